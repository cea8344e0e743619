// Adam and its kin on CUDA devices.
#include "cuda_rules.h"

namespace kvtable {

KVTABLE_CUDA_RULES(AdamRuleList);

}  // namespace kvtable
