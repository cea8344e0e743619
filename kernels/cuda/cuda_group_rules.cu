// Rules with a sparse group lasso on CUDA devices.
#include "cuda_rules.h"

namespace kvtable {

KVTABLE_CUDA_RULES(GroupRuleList);

}  // namespace kvtable
