// kvtools._kvtable.Table and its docstrings.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>
#include <vector>

#include "bindings.h"
#include "table_class.h"

using nb::literals::operator""_a;

namespace kvtable {

void BindTable(nb::module_& m) {
  static const std::string table_doc =
      std::string(R"(A map from integer keys to rows, each a value and its optimizer slots.

Safe from any number of threads; every operation takes a batch and releases the GIL. Arrays must be C-contiguous and of
exactly the table's dtypes; keys may have any shape, and rows then have shape (*keys.shape, dim).

Args:
    key_dtype: int64, int32 or uint64. Every key value is legal.
    value_dtype: float32, float16, bfloat16 (ml_dtypes) or float64.
    dim: elements of a value.
    initializer: what a new key's value is: a pure function of seed, key and column. See below.
    slots: a sequence of (name, width, "constant" | "copy_value", constant); the last two may be left out.
    capacity_hint: rows to make room for at once. The table grows by itself.
    max_capacity: the most rows that a batch leaves behind: those with the lowest score are evicted, but not those of
        the batch itself, unless it has more keys than that. 0: no bound.
    eviction: what a row's score is: "lru", the time of its last touch (microseconds since 1970); "lfu", how often it was
        touched, then when (count << 32 | seconds); "custom", what set_scores said; "epoch_lru" and "epoch_lfu", in
        which epoch (set_epoch) it was last touched, then when, or how often (epoch << 32 | seconds or count).
    shards: a power of two up to 64; 0 takes four per CPU, at least 8.
    huge_pages: ask the system for 2 MiB pages.
    threads: threads for large batches; 0 takes one per CPU.
    max_age: the age at which a row is not there any more: what has gone by since it was last written. 0: rows do not
        age. The table stamps versions itself then.
    age_unit: "seconds", or "steps": what apply() counts.
    clock: uint64 (1,), microseconds since 1970, set by whoever made it. None: the system's clock.
    admission: which keys gather_or_insert gives a row: {"kind": "count", "enter_threshold": n}; the same of kind "bloom",
        with "capacity" and "error"; or {"kind": "probability", "p": p}, drawn with the seed of each call. "below" says
        what the others give: "initial" values or "zeros". apply() then leaves out keys without a row. None: all keys.
    padding_key: a key that never has a row; None: there is none.
    max_memory: bytes of memory for rows; those that they have no room for lie in a file. 0: all rows are in memory.
    spill: the folder of that file, on a local disk. The file has no name, and goes with the table or its process.
    name: of the table, for messages about the folder.

Raises:
    ValueError, TypeError: for arguments that cannot be.
    MemoryError: where the system refuses memory.

)") + kInitializerDoc +
      R"(
Example:
    >>> import numpy as np
    >>> from kvtools._kvtable import Table
    >>> table = Table("int64", "float32", 2, initializer=0.5)
    >>> table.gather_or_insert(np.array([7, -1]))
    array([[0.5, 0.5],
           [0.5, 0.5]], dtype=float32)
    >>> len(table)
    2
)";
  nb::class_<PyTable>(m, "Table", table_doc.c_str())
      .def(nb::init<nb::handle, nb::handle, int64_t, nb::handle, nb::handle, int64_t, int64_t,
                    const std::string&, int, bool, int, int64_t, const std::string&, nb::handle, nb::handle,
                    nb::handle, int64_t, const std::string&, const std::string&>(),
           "key_dtype"_a, "value_dtype"_a, "dim"_a, nb::kw_only(), "initializer"_a = nb::none(),
           "slots"_a = nb::make_tuple(), "capacity_hint"_a = 0, "max_capacity"_a = 0, "eviction"_a = "lru",
           "shards"_a = 0, "huge_pages"_a = true, "threads"_a = 0, "max_age"_a = 0, "age_unit"_a = "seconds",
           "clock"_a = nb::none(), "admission"_a = nb::none(), "padding_key"_a = nb::none(),
           "max_memory"_a = 0, "spill"_a = "", "name"_a = "")
      .def("__len__", [](PyTable& t) { return t.table().Size(); })
      .def_prop_ro(
          "key_dtype", [](PyTable& t) { return t.key_dtype(); }, "The keys' NumPy dtype.")
      .def_prop_ro(
          "value_dtype", [](PyTable& t) { return t.value_dtype(); }, "The values' NumPy dtype.")
      .def_prop_ro(
          "dim", [](PyTable& t) { return t.table().dim(); }, "Elements of a value.")
      .def_prop_rw("initializer", &PyTable::GetInitializer, &PyTable::SetInitializer,
                   nb::for_getter(nb::sig("def initializer(self, /) -> dict")),
                   "The initializer as a dict. Setting it replaces the initial values of rows not yet there.")
      .def_prop_ro("slots", &PyTable::GetSlots, "A list of (name, width, init, constant).")
      .def_prop_ro(
          "max_capacity", [](PyTable& t) { return t.table().max_capacity(); },
          "The most rows that a batch leaves behind; 0 where there is no bound.")
      .def_prop_ro(
          "eviction", [](PyTable& t) { return NameOf(t.table().eviction()); },
          "What a row's score is: \"lru\", \"lfu\", \"custom\", \"epoch_lru\" or \"epoch_lfu\".")
      .def_prop_ro(
          "evicted_rows", [](PyTable& t) { return t.table().EvictedCount(); },
          "How many rows were evicted so far to keep the capacity.")
      .def_prop_ro(
          "waiting_keys", [](PyTable& t) { return t.admitter() == nullptr ? 0 : t.admitter()->waiting(); },
          "How many keys are counted, and have no row yet; a Bloom filter does not know: 0.")
      .def_prop_ro(
          "admission_bytes", [](PyTable& t) { return t.admitter() == nullptr ? 0 : t.admitter()->bytes(); },
          "The memory of what counts keys that have no row.")
      .def_prop_ro(
          "expired_rows", [](PyTable& t) { return t.table().ExpiredCount(); },
          "How many rows have gone by age, norm, frequency or rank.")
      .def_prop_ro(
          "generation", [](PyTable& t) { return t.table().generation(); },
          "A number that changes whenever the layout of rows does.")
      .def("gather", &PyTable::Gather, "keys"_a, "missing"_a = "zeros", nb::kw_only(), "out"_a = nb::none(),
           "found"_a = nb::none(), "positions"_a = nb::none(), R"(Look keys up without changing the table.

Args:
    keys: (...) of key_dtype.
    missing: what an absent key gives: "zeros", "initial", or an array (dim,) or (rows, dim), of which key i takes
        row i mod rows.
    out: (..., dim) of value_dtype to write to, instead of a new array.
    found: (...) of bool to write to: whether each key was there.
    positions: (...) of uint64 to write to: where each key's row lies, shard << 32 | row, or 2**64 - 1 where it has
        none. It stays so until the key is removed.

Returns:
    (..., dim) of value_dtype.

Example:
    >>> table = Table("int64", "float32", 2)
    >>> table.gather(np.array([1]))
    array([[0., 0.]], dtype=float32)
)")
      .def("gather_or_insert", &PyTable::GatherOrInsert, "keys"_a, nb::kw_only(), "frequency"_a = 0,
           "version"_a = 0, "admission"_a = 1.0, "seed"_a = 0, "out"_a = nb::none(),
           "inserted"_a = nb::none(), "positions"_a = nb::none(),
           R"(Look keys up; insert absent ones with their initial value.

Args:
    keys: (...) of key_dtype.
    frequency: what each occurrence of a new key adds to its frequency.
    version: the version of new rows.
    admission: the probability that an absent key is inserted; one that is not gives zeros.
    seed: of the admission, which is a function of seed and key: give each call another.
    out: (..., dim) of value_dtype to write to, instead of a new array.
    inserted: (...) of bool to write to: true for each occurrence of a key that was new.
    positions: (...) of uint64 to write to: where each key's row lies, shard << 32 | row; 2**64 - 1 for a key that was
        not admitted. In a bounded table the row may be evicted at once, where the batch has more keys than the capacity.

Returns:
    (..., dim) of value_dtype.

Example:
    >>> table = Table("int64", "float32", 1, initializer=3.0)
    >>> table.gather_or_insert(np.array([5, 5]))
    array([[3.],
           [3.]], dtype=float32)
)")
      .def("gather_or_insert_evicting", &PyTable::GatherOrInsertEvicting, "keys"_a, nb::kw_only(),
           "frequency"_a = 0, "version"_a = 0, "admission"_a = 1.0, "seed"_a = 0, "out"_a = nb::none(),
           "inserted"_a = nb::none(), "positions"_a = nb::none(),
           R"(As gather_or_insert, and give back what the batch evicts.

Args:
    keys, frequency, version, admission, seed, out, inserted, positions: as for gather_or_insert.

Returns:
    (..., dim) of value_dtype; the evicted keys (n,), lowest score first, and their values (n, dim).

Example:
    >>> table = Table("int64", "float32", 1, initializer=3.0, max_capacity=1)
    >>> _ = table.gather_or_insert(np.array([5]))
    >>> table.gather_or_insert_evicting(np.array([6]))
    (array([[3.]], dtype=float32), array([5]), array([[3.]], dtype=float32))
)")
      .def("scores", &PyTable::Scores, "keys"_a, R"(The score of each key's row.

Args:
    keys: (...) of key_dtype.

Returns:
    (...) of uint64; zeros for absent keys, and in a table without a bound.

Example:
    >>> Table("int64", "float32", 1, max_capacity=9).scores(np.array([5]))
    array([0], dtype=uint64)
)")
      .def("set_scores", &PyTable::SetScores, "keys"_a, "scores"_a,
           R"(Set the scores that "custom" eviction goes by.

Args:
    keys: (...) of key_dtype; absent ones are ignored, and of equal ones the last wins.
    scores: (...) of uint64.

Returns:
    How many of the keys are there.

Raises:
    RuntimeError: the table is not bounded, or makes its scores itself.

Example:
    >>> table = Table("int64", "float32", 1, max_capacity=2, eviction="custom")
    >>> _ = table.gather_or_insert(np.array([5, 6]))
    >>> table.set_scores(np.array([5, 9]), np.array([7, 7], np.uint64))
    1
    >>> _ = table.gather_or_insert(np.array([8]))
    >>> table.contains(np.array([5, 6, 8]))
    array([ True, False,  True])
)")
      .def(
          "set_epoch",
          [](PyTable& t, uint32_t epoch) {
            nb::gil_scoped_release unlocked;
            t.table().SetEpoch(epoch);
          },
          "epoch"_a,
          R"(Set the epoch of the touches to come: rows last touched in a lower one are evicted first.

Args:
    epoch: 0 to 2**32 - 1, which should only rise; 0 until this is called.

Raises:
    RuntimeError: the table is not bounded, or has no epochs.

Example:
    >>> table = Table("int64", "float32", 1, max_capacity=2, eviction="epoch_lfu")
    >>> _ = table.gather_or_insert(np.array([5, 5]))
    >>> table.set_epoch(1)
    >>> _ = table.gather_or_insert(np.array([6]))
    >>> _ = table.gather_or_insert(np.array([7]))
    >>> table.contains(np.array([5, 6, 7]))
    array([False,  True,  True])
)")
      .def_prop_ro(
          "now", [](PyTable& t) { return t.table().Now(); },
          "The step or the second by which rows age; where they do not, the second that it is.")
      .def(
          "set_step",
          [](PyTable& t, uint32_t step) {
            nb::gil_scoped_release unlocked;
            t.table().SetStep(step);
          },
          "step"_a,
          R"(Set the step by which rows age.

Args:
    step: not before the one that it is.

Raises:
    ValueError: it is before that one. RuntimeError: rows do not age by steps.

Example:
    >>> table = Table("int64", "float32", 1, max_age=2, age_unit="steps")
    >>> _ = table.gather_or_insert(np.array([5]))
    >>> table.set_step(1)
    >>> table.contains(np.array([5]))
    array([ True])
    >>> table.set_step(2)
    >>> table.contains(np.array([5]))
    array([False])
)")
      .def("evict", &PyTable::Evict, "policy"_a, "number"_a, nb::kw_only(), "by"_a = "frequency",
           R"(Remove the rows that a policy names, slots and all. New rows take their memory.

Args:
    policy: "after_steps" or "after_seconds": rows of that age and older; "below_norm": whose value has an L2 norm below
        that; "below_frequency": whose frequency is below that; "keep_top": all but that many.
    number: whole, 1 or more; a norm is any number above 0.
    by: what "keep_top" goes by: "frequency", of equal ones those written last; "version", of equal ones the more
        frequent; "norm". Of rows that are equal in that those with the higher keys stay, as unsigned numbers.

Returns:
    How many rows went.

Raises:
    ValueError: no such policy or number. RuntimeError: versions are of the other unit.

Example:
    >>> table = Table("int64", "float32", 1)
    >>> table.upsert(np.array([5, 6, 7]), np.array([[3.0], [1.0], [2.0]], np.float32))
    >>> table.evict("below_norm", 1.5)
    1
    >>> table.evict("keep_top", 1, by="norm")
    1
    >>> table.contains(np.array([5, 6, 7]))
    array([ True, False, False])
)")
      .def("begin_sweep", &PyTable::BeginSweep, "policies"_a,
           "Begin with passes of policies, (policy, number) or (policy, number, by), which sweep() goes on "
           "with.")
      .def("sweep", &PyTable::RunSweep, "rows"_a,
           "Look at about so many rows more, over and over again. Returns how many went.")
      .def("gather_columns", &PyTable::GatherColumns, "keys"_a, "columns"_a = nb::none(), nb::kw_only(),
           "found"_a = nb::none(), R"(Look up several columns at once without changing the table.

Args:
    keys: (...) of key_dtype.
    columns: column numbers (0 is the value, i + 1 is slot i) or names ("value", a slot's name); None takes all.
    found: (...) of bool to write to: whether each key was there.

Returns:
    A list of arrays (..., width), in the order of `columns`. An absent key gives initial values.

Example:
    >>> table = Table("int64", "float32", 1, slots=[("m", 2, "constant", 1.0)])
    >>> table.gather_columns(np.array([5]), ["m"])
    [array([[1., 1.]], dtype=float32)]
)")
      .def("contains", &PyTable::Contains, "keys"_a, nb::kw_only(), "out"_a = nb::none(),
           R"(Which keys are there.

Args:
    keys: (...) of key_dtype.
    out: (...) of bool to write to, instead of a new array.

Returns:
    (...) of bool.

Example:
    >>> Table("int64", "float32", 1).contains(np.array([5]))
    array([False])
)")
      .def("gather_stamps", &PyTable::GatherStamps, "keys"_a,
           R"(The frequency and version of each key; zeros where absent.

Args:
    keys: (...) of key_dtype.

Returns:
    Two arrays (...) of uint32: frequencies, versions.

Example:
    >>> table = Table("int64", "float32", 1)
    >>> _ = table.gather_or_insert(np.array([5, 5]), frequency=1, version=9)
    >>> table.gather_stamps(np.array([5, 6]))
    (array([2, 0], dtype=uint32), array([9, 0], dtype=uint32))
)")
      .def("upsert", &PyTable::Upsert, "keys"_a, "values"_a, nb::kw_only(), "frequency"_a = 0,
           "version"_a = 0,
           R"(Write values; the last of equal keys wins. A new row's slots get their initial contents.

Args:
    keys: (...) of key_dtype.
    values: (..., dim) of value_dtype.
    frequency: what each occurrence adds to its row's frequency.
    version: what becomes the rows' version.

Example:
    >>> table = Table("int64", "float32", 1)
    >>> table.upsert(np.array([5]), np.array([[2.0]], np.float32))
    >>> table.gather(np.array([5]))
    array([[2.]], dtype=float32)
)")
      .def("upsert_columns", &PyTable::UpsertColumns, "keys"_a, "columns"_a, nb::kw_only(), "frequency"_a = 0,
           "version"_a = 0, R"(Write some columns; the others of a new row get their initial contents.

Args:
    keys: (...) of key_dtype.
    columns: a dict from column number or name to an array (..., width) of value_dtype.
    frequency: what each occurrence adds to its row's frequency.
    version: what becomes the rows' version.

Example:
    >>> table = Table("int64", "float32", 1, slots=[("m", 1)])
    >>> table.upsert_columns(np.array([5]), {"m": np.array([[2.0]], np.float32)})
    >>> table.gather_columns(np.array([5]))
    [array([[0.]], dtype=float32), array([[2.]], dtype=float32)]
)")
      .def("accumulate", &PyTable::Accumulate, "keys"_a, "deltas"_a, nb::kw_only(), "from_zeros"_a = false,
           "frequency"_a = 0, "version"_a = 0, R"(Add to values; equal keys add up in the order of the batch.

Args:
    keys: (...) of key_dtype.
    deltas: (..., dim) of value_dtype.
    from_zeros: an absent key starts from zeros instead of its initial value.
    frequency: what each occurrence adds to its row's frequency.
    version: what becomes the rows' version.

Example:
    >>> table = Table("int64", "float32", 1)
    >>> table.accumulate(np.array([5, 5]), np.array([[2.0], [3.0]], np.float32))
    >>> table.gather(np.array([5]))
    array([[5.]], dtype=float32)
)")
      .def("apply", &PyTable::Apply, "optimizer"_a, "keys"_a, "gradients"_a, "hyperparameters"_a,
           nb::kw_only(), "slots"_a = std::vector<nb::object>(), "positions"_a = nb::none(),
           "stochastic_rounding"_a = false, "seed"_a = 0, "skip_nonfinite"_a = false, "frequency"_a = 1,
           "version"_a = 0, R"(One training step: update value and slots of each distinct key in place.

Gradients of equal keys are summed first. An absent key is inserted with its initial value first.

Args:
    optimizer: one of optimizers().
    keys: (...) of key_dtype.
    gradients: (..., dim) of value_dtype.
    hyperparameters: a dict from name to number; those with a fallback may be left out.
    slots: the columns (numbers or names) of the optimizer's slots, in its order.
    positions: (...) of uint64, what a lookup remembered, or None.
    stochastic_rounding: round 16-bit columns up or down at random, without bias.
    seed: of the rounding; give each step another.
    skip_nonfinite: leave rows alone whose summed gradient has a NaN or an infinity.
    frequency: what each step adds to its rows' frequency.
    version: what becomes the rows' version.

Returns:
    How many rows were updated, and how many were skipped.

Raises:
    ValueError: an optimizer, hyperparameter or shape that does not fit; RuntimeError: a slot that is not as wide as the
        value. Nothing is changed then.

Example:
    >>> table = Table("int64", "float32", 1)
    >>> table.apply("sgd", np.array([5, 5]), np.array([[1.0], [2.0]], np.float32), {"learning_rate": 0.5})
    (1, 0)
    >>> table.gather(np.array([5]))
    array([[-1.5]], dtype=float32)
)")
      .def("zeroed", &PyTable::Zeroed, "keys"_a,
           R"(Which rows an optimizer's penalty has zeroed, or an import brought as zeros.

Args:
    keys: (...) of key_dtype.

Returns:
    (...) of bool; False for absent keys.

Example:
    >>> Table("int64", "float32", 1).zeroed(np.array([5]))
    array([False])
)")
      .def_prop_ro(
          "zeroed_rows", [](PyTable& t) { return t.table().ZeroedRows(); },
          "How many rows `zeroed` is true for.")
      .def_prop_ro(
          "skipped_updates", [](PyTable& t) { return t.table().SkippedUpdates(); },
          "Row updates left out so far because of gradients that are not finite.")
      .def("remove", &PyTable::Remove, "keys"_a, R"(Remove keys; absent ones are ignored.

Args:
    keys: (...) of key_dtype.

Returns:
    How many rows were there and are gone.

Example:
    >>> Table("int64", "float32", 1).remove(np.array([5]))
    0
)")
      .def(
          "clear",
          [](PyTable& t) {
            nb::gil_scoped_release unlocked;
            t.table().Clear();
          },
          "Remove every row and give the memory back.")
      .def(
          "reserve",
          [](PyTable& t, int64_t rows) {
            nb::gil_scoped_release unlocked;
            t.table().Reserve(rows, t.pool());
          },
          "rows"_a, "Make room for this many rows in all, so that inserting them rebuilds nothing.")
      .def("ensure_slots", &PyTable::EnsureSlots, "slots"_a, R"(Make the slots exactly these, in this order.

A slot of the same name and width keeps its contents, a new one starts from its initial contents, others are dropped.

Args:
    slots: as for the constructor.

Returns:
    The new generation; the present one where nothing changes.

Example:
    >>> table = Table("int64", "float32", 1)
    >>> table.ensure_slots([("m", 1, "constant", 0.1)])
    2
)")
      .def(
          "export",
          [](const std::shared_ptr<PyTable>& t, const nb::object& columns, int64_t chunk, bool scores) {
            return std::make_shared<PyExporter>(t, columns, chunk, scores);
          },
          "columns"_a = nb::none(), nb::kw_only(), "chunk"_a = 65536, "scores"_a = false,
          R"(Iterate over all rows in chunks.

Rows inserted meanwhile may be left out; every other row comes once, and whole.

Args:
    columns: column numbers or names, as the slots are when the export begins; None takes all.
    chunk: rows at a time, at most.
    scores: give the rows' scores, too; zeros in a table without a bound.

Returns:
    An iterator of (keys (n,), frequencies (n,), versions (n,), {column number: (n, width)}), and scores (n,) of uint64
    where asked for.

Raises:
    RuntimeError: a slot that is asked for went away, or changed its place, since the export began.

Example:
    >>> table = Table("int64", "float32", 1)
    >>> table.upsert(np.array([5]), np.array([[2.0]], np.float32))
    >>> list(table.export())
    [(array([5]), array([0], dtype=uint32), array([0], dtype=uint32), {0: array([[2.]], dtype=float32)})]
)")
      .def("import_rows", &PyTable::Import, "keys"_a, "columns"_a, nb::kw_only(),
           "frequencies"_a = nb::none(), "versions"_a = nb::none(), "scores"_a = nb::none(),
           R"(Upsert rows with their stamps, as an export gave them.

Args:
    keys: (...) of key_dtype.
    columns: a dict from column number or name to an array (..., width) of value_dtype.
    frequencies, versions: (...) of uint32; None: zeros.
    scores: (...) of uint64, for a bounded table; None: "lru" starts from the versions as seconds, "lfu" from the
        frequencies. What is too much goes by score, the rows of the batch like the others.

Example:
    >>> table = Table("int64", "float32", 1)
    >>> table.import_rows(np.array([5]), {0: np.array([[2.0]], np.float32)}, versions=np.array([3], np.uint32))
)")
      .def("memory", &PyTable::Memory,
           "A dict of rows, row_bytes, index_bytes, column_bytes, slack_bytes and overhead_per_row (bytes); "
           "and of a "
           "table with max_memory, whose row_bytes are those in memory: spilled_rows, rows in the file; "
           "file_bytes; "
           "rows_read and rows_written so far.")
      .def(
          "max_probe_length",
          [](PyTable& t) {
            nb::gil_scoped_release unlocked;
            return t.table().MaxProbeLength();
          },
          "The most cache lines of the index that the lookup of a present key reads. Scans the index.");

  nb::class_<PyExporter>(m, "Exporter", "An iterator over a table's rows, in chunks. Made by Table.export.")
      .def("__iter__", [](nb::object self) { return self; })
      .def("__next__", &PyExporter::Next)
      .def_prop_ro("max_rows", &PyExporter::max_rows, "At least the number of rows still to come.");
}

}  // namespace kvtable
