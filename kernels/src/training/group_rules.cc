// Rules with a sparse group lasso.
#include "optimizers/group_rules.h"

#include "training/rule_functions.h"

namespace kvtable {

std::vector<CompiledRule> GroupRules() { return Compile(GroupRuleList{}); }

}  // namespace kvtable
