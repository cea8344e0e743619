// Rules with a sparse group lasso.
#pragma once

#include "optimizers/ftrl.h"
#include "optimizers/group_adabelief.h"
#include "optimizers/group_adagrad.h"
#include "optimizers/group_adam.h"
#include "optimizers/group_amsgrad.h"
#include "optimizers/group_lamb.h"
#include "optimizers/group_momentum.h"
#include "optimizers/rule.h"

namespace kvtable {

using GroupRuleList =
    RuleList<GroupAdaBelief, GroupAdagrad, GroupAdam, GroupAmsGrad, GroupFtrl, GroupLamb, GroupMomentum>;

}  // namespace kvtable
