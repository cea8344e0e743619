// Rules with a sparse group lasso.
#include "optimizers/ftrl.h"
#include "optimizers/group_adabelief.h"
#include "optimizers/group_adagrad.h"
#include "optimizers/group_adam.h"
#include "optimizers/group_amsgrad.h"
#include "optimizers/group_lamb.h"
#include "optimizers/group_momentum.h"
#include "rule_functions.h"

namespace kvtable {

std::vector<CompiledRule> GroupRules() {
  return Compile<GroupAdaBelief, GroupAdagrad, GroupAdam, GroupAmsGrad, GroupFtrl, GroupLamb,
                 GroupMomentum>();
}

}  // namespace kvtable
