// The table in device memory: pooled lookups, their gradients, and the splits they take.
#pragma once

#include "device_table_impl.h"
#include "pool_kernels.h"
#include "splits_kernels.h"
#include "table/check_batch.h"
#include "values/elements.h"

namespace kvtable {

template <class Device>
void DeviceTableImpl<Device>::GatherPooled(const DeviceKeys& keys, const DeviceBags& bags, Missing missing,
                                           void* out, DeviceStream stream) {
  CheckPooled(keys, bags, missing);
  const BatchOperation operation(this, keys, stream, Does::kRead);
  PrepareScratch(keys.n);
  Locate(keys, numbers(), nullptr, nullptr, nullptr, nullptr);
  Pool(keys, bags, missing, out);
}

template <class Device>
void DeviceTableImpl<Device>::GatherPooledOrInsert(const DeviceKeys& keys, const DeviceBags& bags,
                                                   Stamp stamp, void* out, DeviceStream stream) {
  CheckPooled(keys, bags, Missing::kZeros);
  const BatchOperation operation(this, keys, stream);
  InsertStamped(keys, operation.StampOf(stamp), nullptr, MayInsert());
  Pool(keys, bags, Missing::kZeros, out);
  TouchAndEvict(keys, true, nullptr, nullptr);
}

template <class Device>
void DeviceTableImpl<Device>::MakeSplits(const int64_t* row_ids, int64_t stride, int64_t n, int64_t bags,
                                         int64_t* splits, DeviceStream stream) {
  if (stride < 1 || n < 0 || bags < 0) {
    throw Error(ErrorCode::kInvalidArgument, "Splits for table '" + options_.name + "' of " +
                                                 std::to_string(n) + " row ids, " + std::to_string(stride) +
                                                 " apart, in " + std::to_string(bags) +
                                                 " bags; expected 0 or more, 1 or more, and 0 or more.");
  }
  const Operation operation(this, stream);
  device_.Launch(Count(std::max(n, bags + 1)), SplitsBody{row_ids, Count(stride), Count(n), Count(bags),
                                                          splits, &words_.template as<Words>()->bag_mistake});
}

template <class Device>
void DeviceTableImpl<Device>::CheckBags(DeviceStream stream) {
  const Operation operation(this, stream);
  uint64_t* const word = &words_.template as<Words>()->bag_mistake;
  uint64_t mistake = 0;
  device_.Copy(&mistake, word, sizeof(mistake));
  device_.WaitInside();
  if (mistake == 0) return;
  device_.Fill(word, 0, sizeof(mistake));
  const std::string at = std::to_string(BagMistake::PlaceOf(mistake));
  if (BagMistake::KindOf(mistake) == BagMistake::kSplits) {
    throw Error(ErrorCode::kInvalidArgument, "A pooled lookup of table '" + options_.name +
                                                 "', or its gradient, got splits that do not " +
                                                 "rise from 0 to the number of its keys: see those of bag " +
                                                 at + ". What it gave means nothing.");
  }
  throw Error(ErrorCode::kInvalidArgument,
              "Splits for table '" + options_.name +
                  "' were to be made of row ids that do not rise from 0 to " +
                  "less than the number of bags: see number " + at +
                  ". Bring the indices in order (tf.sparse.reorder). What came of it means nothing.");
}

template <class Device>
void DeviceTableImpl<Device>::SpreadGradient(const DeviceBags& bags, const void* gradient, void* out,
                                             DeviceStream stream) {
  const Operation operation(this, stream);
  VisitValueType(options_.value_type, [&](auto t) {
    using T = decltype(t);
    using Weight = const typename Element<T>::Compute;
    device_.Launch(
        Count(bags.bags * options_.dim),
        SpreadGradientBody<T>{Splits(bags, bags.ids), static_cast<Weight*>(bags.weights), bags.combiner,
                              Count(options_.dim), static_cast<const T*>(gradient), static_cast<T*>(out)});
  });
}

template <class Device>
void DeviceTableImpl<Device>::WeightsGradient(const DeviceKeys& keys, const DeviceBags& bags, Missing missing,
                                              const void* pooled, const void* gradient, void* out,
                                              DeviceStream stream) {
  CheckPooled(keys, bags, missing);
  const BatchOperation operation(this, keys, stream, Does::kRead);
  PrepareScratch(keys.n);
  Locate(keys, numbers(), nullptr, nullptr, nullptr, nullptr);
  VisitValueType(options_.value_type, [&](auto t) {
    using T = decltype(t);
    using Compute = typename Element<T>::Compute;
    device_.Launch(Count(keys.n),
                   WeightsGradientBody<T>{Ids<T>(keys, missing), Splits(bags, keys.n),
                                          static_cast<const Compute*>(bags.weights), bags.combiner,
                                          Count(options_.dim), static_cast<const T*>(pooled),
                                          static_cast<const T*>(gradient), static_cast<Compute*>(out)});
  });
}

template <class Device>
void DeviceTableImpl<Device>::CheckPooled(const DeviceKeys& keys, const DeviceBags& bags,
                                          Missing missing) const {
  CheckBatch(keys.n);
  RequireFloating();
  if (bags.bags < 0 || (bags.bags == 0 && keys.n > 0)) {
    throw Error(ErrorCode::kInvalidArgument, "A pooled lookup of table '" + options_.name + "' has " +
                                                 std::to_string(keys.n) + " keys in " +
                                                 std::to_string(bags.bags) + " bags.");
  }
  if (missing != Missing::kDefault) return;
  throw Error(ErrorCode::kInvalidArgument,
              "A pooled lookup of table '" + options_.name +
                  "' takes zeros or initial values for missing keys; got default rows.");
}

template <class Device>
void DeviceTableImpl<Device>::Pool(const DeviceKeys& keys, const DeviceBags& bags, Missing missing,
                                   void* out) {
  VisitValueType(options_.value_type, [&](auto t) {
    using T = decltype(t);
    using Weight = const typename Element<T>::Compute;
    device_.Launch(
        Count(bags.bags * options_.dim),
        PoolBody<T>{Ids<T>(keys, missing), Splits(bags, keys.n), static_cast<Weight*>(bags.weights),
                    bags.combiner, Count(options_.dim), static_cast<T*>(out)});
  });
}

}  // namespace kvtable
