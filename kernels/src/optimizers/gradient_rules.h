// Rules of gradient descent: plain, with momentum, or scaled by past gradients.
#pragma once

#include "optimizers/adadelta.h"
#include "optimizers/adagrad.h"
#include "optimizers/adagrad_da.h"
#include "optimizers/ftrl.h"
#include "optimizers/keras_momentum.h"
#include "optimizers/lion.h"
#include "optimizers/momentum.h"
#include "optimizers/proximal_adagrad.h"
#include "optimizers/proximal_sgd.h"
#include "optimizers/rmsprop.h"
#include "optimizers/rule.h"
#include "optimizers/sgd.h"

namespace kvtable {

using GradientRuleList =
    RuleList<Adadelta, Adagrad, AdagradDA, CenteredRmsProp, CenteredRmsPropPlain, Ftrl, KerasMomentum, Lion,
             Momentum, ProximalAdagrad, ProximalSgd, RmsProp, RmsPropPlain, Sgd>;

}  // namespace kvtable
