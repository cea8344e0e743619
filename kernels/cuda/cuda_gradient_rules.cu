// Rules of gradient descent on CUDA devices.
#include "cuda_rules.h"

namespace kvtable {

KVTABLE_CUDA_RULES(GradientRuleList);

}  // namespace kvtable
