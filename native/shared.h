#pragma once

#include <nanobind/nanobind.h>

namespace slipstream {

// The Python interface of shared memory and of updates in place.
void bind_shared(nanobind::module_& m);

}  // namespace slipstream
