// kvtools._kvtable.optimizers and apply_to_arrays.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "arguments.h"
#include "bindings.h"
#include "kvtable/optimizer.h"
#include "thread_pools.h"

using nb::literals::operator""_a;

namespace kvtable {
namespace {

nb::dict OptimizersDict() {
  nb::dict all;
  for (const OptimizerSpec& spec : Optimizers()) {
    nb::dict hyperparameters;
    for (const Hyperparameter& h : spec.hyperparameters) {
      const nb::object fallback = std::isnan(h.fallback) ? nb::none() : nb::object(nb::float_(h.fallback));
      hyperparameters[h.name] = nb::make_tuple(fallback, Describe(h.range));
    }
    nb::dict slots;
    for (const OptimizerSlot& slot : spec.slots) slots[slot.name] = slot.initial;
    nb::dict one;
    one["hyperparameters"] = hyperparameters;
    one["slots"] = slots;
    all[spec.name] = one;
  }
  return all;
}

nb::tuple ApplyToNumPyArrays(const std::string& optimizer, const std::vector<nb::object>& columns,
                             nb::handle gradients, const nb::dict& hyperparameters, const nb::object& rows,
                             bool stochastic_rounding, uint64_t seed, bool skip_nonfinite) {
  Update update = UpdateOf(optimizer, hyperparameters);
  update.stochastic_rounding = stochastic_rounding;
  update.seed = seed;
  update.skip_nonfinite = skip_nonfinite;
  std::string names = "value";
  for (const OptimizerSlot& slot : update.optimizer->slots) names += std::string(", ") + slot.name;
  if (columns.size() != 1 + update.optimizer->slots.size()) {
    ThrowValue("columns has " + std::to_string(columns.size()) + " arrays; optimizer " + optimizer +
               " expects " + std::to_string(1 + update.optimizer->slots.size()) + ": " + names + ".");
  }
  if (!nb::hasattr(columns[0], "dtype")) ThrowType("columns[0] is not a NumPy array.");
  const std::string name = NameOfDtype(columns[0].attr("dtype"));
  const ValueType type = ValueTypeOf(name);
  const nb::object dtype = DtypeNamed(name);
  std::vector<std::unique_ptr<ArrayView>> views;
  std::vector<void*> data;
  for (size_t c = 0; c < columns.size(); ++c) {
    const std::string what = "columns[" + std::to_string(c) + "]";
    views.push_back(std::make_unique<ArrayView>(what.c_str(), columns[c], dtype, true));
    if (c == 0 && (views[0]->shape().size() != 2 || views[0]->shape()[1] == 0)) {
      ThrowValue("columns[0] has shape " + TextOf(views[0]->shape()) + "; expected (rows, dim).");
    }
    views[c]->ExpectShape(what.c_str(), views[0]->shape());
    data.push_back(views[c]->data());
  }
  const int64_t num_rows = views[0]->shape()[0];
  const int64_t dim = views[0]->shape()[1];
  std::optional<ArrayView> r;
  if (!rows.is_none()) {
    r.emplace("rows", rows, DtypeNamed("int64"), false);
    r->ExpectShape("rows", {r->size()});
    std::vector<bool> seen(static_cast<size_t>(num_rows));
    for (int64_t i = 0; i < r->size(); ++i) {
      const int64_t row = static_cast<const int64_t*>(r->data())[i];
      if (row < 0 || row >= num_rows) {
        ThrowValue("rows has " + std::to_string(row) + "; expected 0 to " + std::to_string(num_rows - 1) +
                   ".");
      }
      if (seen[static_cast<size_t>(row)]) {
        ThrowValue("rows has " + std::to_string(row) + " twice; sum the gradients of equal rows first.");
      }
      seen[static_cast<size_t>(row)] = true;
    }
  }
  const int64_t n = r ? r->size() : num_rows;
  const ArrayView g("gradients", gradients, dtype, false);
  g.ExpectShape("gradients", {n, dim});
  const std::shared_ptr<ParallelFor> pool = PoolOf(0);
  ApplyCounts counts;
  {
    nb::gil_scoped_release unlocked;
    counts = ApplyToArrays(update, type, dim, data, r ? static_cast<const int64_t*>(r->data()) : nullptr, n,
                           g.data(), *pool);
  }
  return nb::make_tuple(counts.updated, counts.skipped);
}

}  // namespace

void BindOptimizers(nb::module_& m) {
  m.def("optimizers", &OptimizersDict, R"(The update rules there are: formulas in docs/optimizer-rules.md.

Returns:
    A dict from name to {"hyperparameters": {name: (fallback, range)}, "slots": {name: initial}}. A fallback of None
    means that the hyperparameter has to be given; initial is what a slot usually starts from.

Example:
    >>> optimizers()["sgd"]["hyperparameters"]
    {'learning_rate': (None, 'a finite number'), 'weight_decay': (0.0, '0 or more')}
    >>> optimizers()["adagrad"]["slots"]
    {'accumulator': 0.1}
)");
  m.def("apply_to_arrays", &ApplyToNumPyArrays, "optimizer"_a, "columns"_a, "gradients"_a,
        "hyperparameters"_a, nb::kw_only(), "rows"_a = nb::none(), "stochastic_rounding"_a = false,
        "seed"_a = 0, "skip_nonfinite"_a = false, R"(One step of an optimizer over rows of arrays, in place.

Args:
    optimizer: one of optimizers().
    columns: value and slots in the optimizer's order, each (rows, dim) of float32, float16, bfloat16 or float64, all of
        one dtype, and none the memory of another.
    gradients: (n, dim) of that dtype.
    hyperparameters: a dict from name to number; those with a fallback may be left out.
    rows: (n,) of int64, which row each gradient is for, each once at most; None: every row, in order.
    stochastic_rounding: round 16-bit columns up or down at random, without bias.
    seed: of the rounding, which is a function of seed, row and column; give each step another.
    skip_nonfinite: leave rows alone whose gradient has a NaN or an infinity.

Returns:
    How many rows were updated, and how many were skipped.

Raises:
    ValueError, TypeError: what does not fit, by name; nothing is changed then.

Example:
    >>> value, accumulator = np.zeros((2, 1), np.float32), np.zeros((2, 1), np.float32)
    >>> apply_to_arrays("momentum", [value, accumulator], np.array([[2.0]], np.float32), {"learning_rate": 0.5},
    ...                 rows=np.array([1]))
    (1, 0)
    >>> value
    array([[ 0.],
           [-1.]], dtype=float32)
)");
}

}  // namespace kvtable
