// kvtools._device_table: tables in device memory for Python, over arrays of any library that speaks DLPack
// (CuPy, PyTorch; NumPy for tables on the CPU's threads), without copies.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "device_table_class.h"

using nb::literals::operator""_a;

NB_MODULE(_device_table, m) {
  using kvtable::PyDeviceExporter;
  using kvtable::PyDeviceTable;
  m.doc() = "Tables in the memory of a CUDA device, over arrays of any library that speaks DLPack.";

  nb::register_exception_translator(kvtable::TranslateError);

  m.def(
      "stand_in_for_gpus",
      [] {
        static const std::unique_ptr<kvtable::ParallelFor> threads = kvtable::MakeThreadPool(2);
        kvtable::Devices().table = [](const kvtable::DeviceTableOptions& options) {
          return kvtable::MakeThreadsTable(options, threads.get());
        };
        kvtable::Devices().work = [](kvtable::DeviceAllocator* allocator) {
          return kvtable::MakeThreadsWork(allocator, threads.get());
        };
      },
      "Makes the tables of GPUs, in this process, on the CPU's threads from now on: to test without a GPU.");

  nb::class_<PyDeviceExporter>(m, "Exporter", "Reads a table in chunks; see DeviceTable.export.")
      .def(
          "next",
          [](PyDeviceExporter& self, const kvtable::Output& keys, const nb::dict& columns,
             const std::optional<kvtable::Output>& frequencies,
             const std::optional<kvtable::Output>& versions, uintptr_t stream,
             const std::optional<kvtable::Output>& scores) {
            return nb::cast<PyDeviceTable*>(self.table)
                ->ExportNext(self.exporter.get(), keys, columns, frequencies, versions, stream, scores);
          },
          nb::arg("keys").noconvert(), "columns"_a = nb::dict(),
          nb::arg("frequencies").noconvert() = nb::none(), nb::arg("versions").noconvert() = nb::none(),
          "stream"_a = 0, nb::kw_only(), nb::arg("scores").noconvert() = nb::none(),
          "Writes as many rows as keys has room for, at most, and returns how many: 0 at the end. "
          "columns: a dict from 'value' or a slot's name to an array (n, width); frequencies "
          "and versions: uint32 (n); scores: uint64 (n), zeros where the table is not bounded.")
      .def_prop_ro(
          "max_rows", [](PyDeviceExporter& self) { return self.exporter->max_rows(); },
          "At least the number of rows still to come, as long as nothing is inserted.");

  static const std::string predicate_doc =
      "A row is meant where all that is given holds. Each range is (least, most), both among what is "
      "meant; None "
      "in place of one is no bound. frequency and version: of the stamps, to 2**32 - 1; score: to 2**64 - 1, "
      "and 0 "
      "for all rows of a table that is not bounded; key: the bits of the key (an int32 is sign-extended) "
      "that "
      "are in "
      "key_mask, as a number from 0 to 2**64 - 1 (a negative key counts as itself + 2**64). Raises "
      "ValueError "
      "on a "
      "range that is none.";

  nb::class_<PyDeviceTable>(
      m, "DeviceTable",
      "A key-value table in device memory.\n\n"
      "Arrays are C-contiguous, of the table's dtypes, in memory that its device reaches: device='cuda' "
      "takes arrays "
      "of CuPy or PyTorch, device='threads' (the same code on the CPU's threads, for tests) those of NumPy. "
      "Work is "
      "queued on `stream`, the number of a CUDA stream (0: the default one), and arrays must stay until it "
      "is done. "
      "Shapes, dtypes and semantics are those of kvtools._kvtable.Table; slots and initializers are spelled "
      "as "
      "there.\n\n"
      ">>> table = DeviceTable('int64', 'float32', 2, device='threads', initializer=0.5)\n"
      ">>> out = np.empty((3, 2), np.float32)\n"
      ">>> table.gather_or_insert(np.array([7, -1, 7]), out)\n"
      ">>> out.tolist(), len(table)\n"
      "([[0.5, 0.5], [0.5, 0.5], [0.5, 0.5]], 2)\n")
      .def(
          nb::init<nb::handle, nb::handle, int64_t, const std::string&, nb::handle, nb::handle, int64_t,
                   std::optional<int64_t>, int64_t, const std::string&, std::optional<int64_t>,
                   const std::string&, int64_t, const std::string&, nb::handle>(),
          "key_dtype"_a, "value_dtype"_a, "dim"_a, nb::kw_only(), "device"_a = "cuda",
          "initializer"_a = nb::none(), "slots"_a = nb::none(), "capacity_hint"_a = 0,
          "max_hbm"_a = nb::none(), "max_capacity"_a = 0, "eviction"_a = "lru",
          "move_hot_rows"_a = nb::none(), "name"_a = "", "max_age"_a = 0, "age_unit"_a = "seconds",
          "clock"_a = nb::none(),
          "max_hbm: bytes of rows in device memory; what is beyond lies in pinned host memory. "
          "max_capacity: the "
          "most rows that a batch leaves behind; 0: no bound. eviction: what a row's score is: 'lru', 'lfu', "
          "'custom', 'epoch_lru' or 'epoch_lfu'. move_hot_rows: how many rows in host memory may change "
          "places with "
          "rows in device memory after every 8 batches that insert or write; 0: never; None: 4096. max_age, "
          "age_unit, clock: as for kvtools._kvtable.Table.")
      .def_prop_ro("max_capacity", &PyDeviceTable::MaxCapacity,
                   "The most rows that a batch leaves behind; 0 where there is no bound.")
      .def_prop_ro("eviction", &PyDeviceTable::EvictionName,
                   "What a row's score is: 'lru', 'lfu', 'custom', 'epoch_lru' or 'epoch_lfu'.")
      .def_prop_ro(
          "expired_rows", &PyDeviceTable::ExpiredRows,
          "How many rows have gone by age, norm, frequency or rank. Waits for the operations before.")
      .def_prop_ro("evicted_rows", &PyDeviceTable::EvictedRows,
                   "How many rows were evicted so far. Waits for all that was queued.")
      .def_prop_ro("slots", &PyDeviceTable::GetSlots, "A list of (name, width, init, constant).")
      .def_prop_ro("generation", &PyDeviceTable::Generation,
                   "A number that changes whenever the layout of rows does.")
      .def(
          "ensure_slots", &PyDeviceTable::EnsureSlots, "slots"_a, "stream"_a = 0,
          "Makes the slots exactly these, in this order, and returns the generation: a slot of the same name "
          "and "
          "width keeps its contents, a new one starts from its initial contents, others are dropped. Waits "
          "for all "
          "that was queued, and for its own work. Raises MemoryError where there is none: the table is as it "
          "was.\n\n"
          ">>> table = DeviceTable('int64', 'float32', 2, device='threads')\n"
          ">>> table.ensure_slots([('m', 2, 'constant', 0.1)]) == table.generation\n"
          "True\n"
          ">>> table.slots\n"
          "[('m', 2, 'constant', 0.1)]\n")
      .def_prop_ro("initializer", &PyDeviceTable::GetInitializer, "The initializer as a dict.")
      .def("set_initializer", &PyDeviceTable::SetInitializer, nb::arg("initializer").none(), "stream"_a = 0,
           "Replaces the initial values of rows not yet there.")
      .def("__len__", &PyDeviceTable::Size, "The number of rows. Waits for all that was queued.")
      .def("memory", &PyDeviceTable::Memory, "Bytes by what they are for. Waits for all that was queued.")
      .def("gather", &PyDeviceTable::Gather, nb::arg("keys").noconvert(), nb::arg("out").noconvert(),
           "missing"_a = "zeros", nb::arg("defaults").noconvert() = nb::none(),
           nb::arg("found").noconvert() = nb::none(), "stream"_a = 0,
           "Reads values (n, dim) into out. A missing key gives zeros, its initial value (missing='initial') "
           "or "
           "defaults[i % len(defaults)].")
      .def("gather_or_insert", &PyDeviceTable::GatherOrInsert, nb::arg("keys").noconvert(),
           nb::arg("out").noconvert(), "frequency"_a = 0, "version"_a = 0,
           nb::arg("inserted").noconvert() = nb::none(), "distinct"_a = false, "stream"_a = 0, nb::kw_only(),
           "admission"_a = 1.0, "seed"_a = 0, nb::arg("evicted_keys").noconvert() = nb::none(),
           nb::arg("evicted_values").noconvert() = nb::none(),
           nb::arg("evicted_scores").noconvert() = nb::none(),
           nb::arg("evicted_count").noconvert() = nb::none(),
           "Reads values into out; a missing key is inserted with its initial value, and stamped. admission: "
           "the "
           "probability that it is, else it gives zeros; a function of seed and key, so give each call "
           "another seed. "
           "evicted_keys and the rest: as for insert_and_evict.")
      .def("gather_columns", &PyDeviceTable::GatherColumns, nb::arg("keys").noconvert(), "columns"_a,
           nb::arg("found").noconvert() = nb::none(), "stream"_a = 0,
           "Reads columns: a dict from 'value' or a slot's name to the array (n, width) that takes it.")
      .def("pointers", &PyDeviceTable::Pointers, nb::arg("keys").noconvert(), nb::arg("out").noconvert(),
           "stream"_a = 0, "Writes the address of each key's row to out, uint64 (n); 0 where it is missing.")
      .def("pointers_or_insert", &PyDeviceTable::PointersOrInsert, nb::arg("keys").noconvert(),
           nb::arg("out").noconvert(), "frequency"_a = 0, "version"_a = 0,
           nb::arg("inserted").noconvert() = nb::none(), "stream"_a = 0,
           "The same; a missing key is inserted with its initial value, and stamped.")
      .def("gather_pooled", &PyDeviceTable::GatherPooled, nb::arg("keys").noconvert(),
           nb::arg("splits").noconvert(), nb::arg("out").noconvert(), "combiner"_a = "mean",
           nb::arg("weights").noconvert() = nb::none(), "missing"_a = "zeros", "stream"_a = 0,
           "Combines the rows of each bag of keys, [splits[b], splits[b + 1]), into out (bags, dim). splits, "
           "int64, "
           "rise from 0 to the number of keys: check_bags tells whether they do.")
      .def("gather_pooled_or_insert", &PyDeviceTable::GatherPooledOrInsert, nb::arg("keys").noconvert(),
           nb::arg("splits").noconvert(), nb::arg("out").noconvert(), "combiner"_a = "mean",
           nb::arg("weights").noconvert() = nb::none(), "frequency"_a = 0, "version"_a = 0, "stream"_a = 0,
           "The same; a missing key is inserted with its initial value, and stamped.")
      .def(
          "spread_gradient", &PyDeviceTable::SpreadGradient, nb::arg("splits").noconvert(),
          nb::arg("gradient").noconvert(), nb::arg("out").noconvert(), "combiner"_a = "mean",
          nb::arg("weights").noconvert() = nb::none(), "stream"_a = 0,
          "Writes the gradient of each key's row (n, dim) to out, given that of what was pooled (bags, dim).")
      .def("weights_gradient", &PyDeviceTable::WeightsGradient, nb::arg("keys").noconvert(),
           nb::arg("splits").noconvert(), nb::arg("weights").noconvert(), nb::arg("pooled").noconvert(),
           nb::arg("gradient").noconvert(), nb::arg("out").noconvert(), "combiner"_a = "mean",
           "missing"_a = "zeros", "stream"_a = 0,
           "Writes the gradient of the weights (n) to out, given what the lookup pooled and the gradient of "
           "that, both "
           "(bags, dim).")
      .def(
          "make_splits", &PyDeviceTable::MakeSplits, nb::arg("row_ids").noconvert(),
          nb::arg("out").noconvert(), "stream"_a = 0,
          "Writes to out, int64 (bags + 1), the splits of sparse indices: bag b has the entries whose row id "
          "is b. "
          "row_ids: int64 (n), or (n, rank), of which the first column counts; they rise, from 0 to bags - "
          "1: "
          "check_bags tells whether they do.\n\n"
          ">>> table = DeviceTable('int64', 'float32', 2, device='threads')\n"
          ">>> splits = np.empty(4, np.int64)\n"
          ">>> table.make_splits(np.array([0, 2, 2]), splits)\n"
          ">>> splits.tolist()\n"
          "[0, 1, 1, 3]\n")
      .def(
          "check_bags", &PyDeviceTable::CheckBags, "stream"_a = 0,
          "Raises ValueError where splits or row ids that an operation was given since the last call of this "
          "are not "
          "as they have to be; what that operation gave means nothing then. Waits for all that was queued.")
      .def("contains", &PyDeviceTable::Contains, nb::arg("keys").noconvert(), nb::arg("out").noconvert(),
           "stream"_a = 0, "Writes to out, bool (n), whether each key is there.")
      .def("gather_stamps", &PyDeviceTable::GatherStamps, nb::arg("keys").noconvert(),
           nb::arg("frequencies").noconvert(), nb::arg("versions").noconvert(), "stream"_a = 0,
           "Reads frequencies and versions, uint32 (n); zeros where a key is missing.")
      .def("upsert", &PyDeviceTable::Upsert, nb::arg("keys").noconvert(), nb::arg("values").noconvert(),
           "frequency"_a = 0, "version"_a = 0, "distinct"_a = false, "stream"_a = 0,
           "Writes values (n, dim); of equal keys the last wins. distinct: there are none, which saves work.")
      .def("insert_and_evict", &PyDeviceTable::InsertAndEvict, nb::arg("keys").noconvert(),
           nb::arg("values").noconvert(), nb::arg("scores").noconvert() = nb::none(), "frequency"_a = 0,
           "version"_a = 0, "distinct"_a = false, "stream"_a = 0, nb::kw_only(),
           nb::arg("evicted_keys").noconvert() = nb::none(),
           nb::arg("evicted_values").noconvert() = nb::none(),
           nb::arg("evicted_scores").noconvert() = nb::none(),
           nb::arg("evicted_count").noconvert() = nb::none(),
           "As upsert, and hands out the rows that the batch evicts, the lowest score first. scores: uint64 "
           "(n), the "
           "keys', for a table that evicts by 'custom'. evicted_keys (m), evicted_values (m, dim), "
           "evicted_scores, "
           "uint64 (m): what takes them, each as long as the others; no batch evicts more rows than it has "
           "keys, and "
           "those beyond m are not written. evicted_count: uint64 (1), how many went.\n\n"
           ">>> table = DeviceTable('int64', 'float32', 1, device='threads', max_capacity=1)\n"
           ">>> table.upsert(np.array([5]), np.array([[2.0]], np.float32))\n"
           ">>> gone, count = np.zeros(1, np.int64), np.zeros(1, np.uint64)\n"
           ">>> table.insert_and_evict(np.array([6]), np.array([[3.0]], np.float32), evicted_keys=gone,\n"
           "...                        evicted_count=count)\n"
           ">>> gone.tolist(), count.tolist(), len(table)\n"
           "([5], [1], 1)\n")
      .def("upsert_columns", &PyDeviceTable::UpsertColumns, nb::arg("keys").noconvert(), "columns"_a,
           "frequency"_a = 0, "version"_a = 0, "distinct"_a = false, "stream"_a = 0,
           "Writes the named columns; others of a new row get their initial values.")
      .def("accumulate", &PyDeviceTable::Accumulate, nb::arg("keys").noconvert(),
           nb::arg("deltas").noconvert(), "from_zeros"_a = false, "frequency"_a = 0, "version"_a = 0,
           "stream"_a = 0, "Adds deltas (n, dim), those of equal keys, too.")
      .def("apply", &PyDeviceTable::Apply, "optimizer"_a, nb::arg("keys").noconvert(),
           nb::arg("gradients").noconvert(), "hyperparameters"_a, nb::kw_only(),
           "slots"_a = std::vector<std::string>(), "distinct"_a = false, "stochastic_rounding"_a = false,
           "seed"_a = 0, "skip_nonfinite"_a = false, "frequency"_a = 1, "version"_a = 0, "stream"_a = 0,
           "One training step: updates value and slots of each distinct key by the sum of its gradients "
           "(n, dim). A missing key is inserted first. slots: the columns of the optimizer's slots, in its "
           "order.")
      .def_prop_ro("skipped_updates", &PyDeviceTable::SkippedUpdates,
                   "Row updates left out so far because of gradients that are not finite. Waits for all that "
                   "was queued.")
      .def("zeroed", &PyDeviceTable::Zeroed, nb::arg("keys").noconvert(), nb::arg("out").noconvert(),
           "stream"_a = 0,
           "Writes to out, bool (n), which rows an optimizer's penalty has zeroed, or an import brought as "
           "zeros.")
      .def_prop_ro("zeroed_rows", &PyDeviceTable::ZeroedRows,
                   "How many rows `zeroed` is true for. Waits for all that was queued.")
      .def("import_rows", &PyDeviceTable::Import, nb::arg("keys").noconvert(), "columns"_a,
           nb::arg("frequencies").noconvert() = nb::none(), nb::arg("versions").noconvert() = nb::none(),
           "stream"_a = 0, nb::kw_only(), nb::arg("scores").noconvert() = nb::none(),
           "Writes rows with their stamps, uint32 (n), as an export gave them. scores: uint64 (n), for a "
           "bounded table; "
           "None: 'lru' starts from the versions as seconds, 'lfu' from the frequencies.")
      .def("scores", &PyDeviceTable::Scores, nb::arg("keys").noconvert(), nb::arg("out").noconvert(),
           "stream"_a = 0,
           "Reads the score of each key's row, uint64 (n); zeros where a key is missing, or the table is not "
           "bounded.")
      .def("set_scores", &PyDeviceTable::SetScores, nb::arg("keys").noconvert(),
           nb::arg("scores").noconvert(), "stream"_a = 0,
           "Sets the scores, uint64 (n), of the keys that are there; of equal keys the last wins. Raises "
           "RuntimeError "
           "unless the table evicts by 'custom'.")
      .def("set_epoch", &PyDeviceTable::SetEpoch, "epoch"_a,
           "Sets the epoch of the operations to come: rows last touched in a lower one are evicted first. "
           "Raises "
           "RuntimeError unless the table evicts by 'epoch_lru' or 'epoch_lfu'.")
      .def_prop_ro("now", &PyDeviceTable::Now, "The step or the second by which rows age.")
      .def("set_step", &PyDeviceTable::SetStep, "step"_a, "Sets the step by which rows age.")
      .def("evict", &PyDeviceTable::Evict, "policy"_a, "number"_a, nb::kw_only(), "by"_a = "frequency",
           "As Table.evict of kvtools._kvtable. Waits for it.")
      .def("begin_sweep", &PyDeviceTable::BeginSweep, "policies"_a, "As Table.begin_sweep.")
      .def("sweep", &PyDeviceTable::RunSweep, "rows"_a, "As Table.sweep. Waits for it.")
      .def("remove", &PyDeviceTable::Remove, nb::arg("keys").noconvert(),
           nb::arg("removed").noconvert() = nb::none(), "stream"_a = 0,
           "Removes keys; those that are not there are ignored. Writes to removed, uint64 (1), how many were "
           "there.")
      .def(
          "remove_if",
          [](PyDeviceTable& self, nb::handle frequency, nb::handle version, nb::handle score, nb::handle key,
             const nb::int_& key_mask, const std::optional<kvtable::Output>& removed, uintptr_t stream) {
            self.RemoveIf(kvtable::PredicateOf(frequency, version, score, key, key_mask), removed, stream);
          },
          nb::kw_only(), "frequency"_a = nb::none(), "version"_a = nb::none(), "score"_a = nb::none(),
          "key"_a = nb::none(), "key_mask"_a = -1, nb::arg("removed").noconvert() = nb::none(),
          "stream"_a = 0,
          ("Removes the rows that are meant, and writes to removed, uint64 (1), how many. " + predicate_doc +
           "\n\n"
           ">>> table = DeviceTable('int64', 'float32', 1, device='threads')\n"
           ">>> table.upsert(np.array([5, 6]), np.zeros((2, 1), np.float32), version=3)\n"
           ">>> table.remove_if(version=(None, 3), key=(6, None))\n"
           ">>> len(table)\n"
           "1\n")
              .c_str())
      .def(
          "move_hot_rows", &PyDeviceTable::MoveHotRows, "most"_a, "stream"_a = 0,
          "Lets up to so many rows in host memory change places with rows in device memory that were touched "
          "longer "
          "ago, the last touched first. It reads the whole index: call it when traffic changed.")
      .def("in_device_memory", &PyDeviceTable::InDeviceMemory, nb::arg("keys").noconvert(),
           nb::arg("out").noconvert(), "stream"_a = 0,
           "Writes to out, bool (n), whether each key has a row, and in device memory.")
      .def("shrink", &PyDeviceTable::Shrink, "rows"_a, "first"_a = "oldest", "stream"_a = 0,
           "Removes rows until so many are left, first the 'oldest' (by version, then frequency) or the "
           "'least_frequent' (by frequency, then version); of equal ones those with the lowest keys, "
           "unsigned.")
      .def("clear", &PyDeviceTable::Clear, "stream"_a = 0,
           "Removes all rows, and keeps the memory for others.")
      .def("reserve", &PyDeviceTable::Reserve, "rows"_a, "batch"_a = 0, "stream"_a = 0,
           "Makes room for rows in all, and for batches of so many keys.")
      .def(
          "export",
          [](nb::object self, nb::handle frequency, nb::handle version, nb::handle score, nb::handle key,
             const nb::int_& key_mask) {
            const kvtable::RowPredicate predicate =
                kvtable::PredicateOf(frequency, version, score, key, key_mask);
            return PyDeviceExporter{self, nb::cast<PyDeviceTable*>(self)->Export(predicate)};
          },
          nb::kw_only(), "frequency"_a = nb::none(), "version"_a = nb::none(), "score"_a = nb::none(),
          "key"_a = nb::none(), "key_mask"_a = -1,
          ("Begins to read the whole table in chunks, or the rows that are meant: see Exporter.next. " +
           predicate_doc)
              .c_str());
}
