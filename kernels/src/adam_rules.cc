// Adam and its kin.
#include "optimizers/adabelief.h"
#include "optimizers/adam.h"
#include "optimizers/adamax.h"
#include "optimizers/amsgrad.h"
#include "optimizers/lamb.h"
#include "optimizers/nadam.h"
#include "optimizers/radam.h"
#include "rule_functions.h"

namespace kvtable {

std::vector<CompiledRule> AdamRules() {
  return Compile<AdaBelief, Adam, Adamax, AmsGrad, Lamb, Nadam, RectifiedAdam>();
}

}  // namespace kvtable
