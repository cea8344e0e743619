// Adam and its kin.
#pragma once

#include "optimizers/adabelief.h"
#include "optimizers/adam.h"
#include "optimizers/adamax.h"
#include "optimizers/amsgrad.h"
#include "optimizers/lamb.h"
#include "optimizers/nadam.h"
#include "optimizers/radam.h"
#include "optimizers/rule.h"

namespace kvtable {

using AdamRuleList = RuleList<AdaBelief, Adam, Adamax, AmsGrad, Lamb, Nadam, RectifiedAdam, RectifiedAmsGrad>;

}  // namespace kvtable
