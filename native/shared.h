#pragma once

#include <nanobind/nanobind.h>

namespace slipstream {

// What shared memory and updates in place offer to Python.
void bind_shared(nanobind::module_& m);

}  // namespace slipstream
