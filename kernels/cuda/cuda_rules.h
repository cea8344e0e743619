// The updates of rows on CUDA devices, which are compiled in files of their own.
#pragma once

#include "cuda_device.h"
#include "update_rows.h"

namespace kvtable {

#define KVTABLE_CUDA_RULES(List)                                                                       \
  template bool UpdateRowsBy(List, CudaDevice* device, const RowsToUpdate& rows, const Update& update, \
                             ValueType value_type, const WorkingMemory& working)

extern KVTABLE_CUDA_RULES(AdamRuleList);
extern KVTABLE_CUDA_RULES(GradientRuleList);
extern KVTABLE_CUDA_RULES(GroupRuleList);

}  // namespace kvtable
