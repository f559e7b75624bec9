// The devices that the double of libfabric (ofi_double.h) tells of.
#pragma once

#include <rdma/fabric.h>

#include <string>
#include <vector>

#include "ofi_double.h"

namespace crossrail::test {

// fi_getinfo: a list that free_info ends, or a negative error. What no caller may ask for is added to violations.
int offer_infos(const DoubleSettings& settings, const fi_info* hints, std::vector<std::string>& violations,
                fi_info** list);

fi_info* duplicate_info(const fi_info* from);
void free_info(fi_info* info);

}  // namespace crossrail::test
