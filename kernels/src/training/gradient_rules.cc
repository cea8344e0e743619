// Rules of gradient descent: plain, with momentum, or scaled by past gradients.
#include "optimizers/gradient_rules.h"

#include "training/rule_functions.h"

namespace kvtable {

std::vector<CompiledRule> GradientRules() { return Compile(GradientRuleList{}); }

}  // namespace kvtable
