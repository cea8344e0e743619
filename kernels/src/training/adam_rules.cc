// Adam and its kin.
#include "optimizers/adam_rules.h"

#include "training/rule_functions.h"

namespace kvtable {

std::vector<CompiledRule> AdamRules() { return Compile(AdamRuleList{}); }

}  // namespace kvtable
