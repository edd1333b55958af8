#pragma once

#include <nanobind/nanobind.h>

namespace slipstream {

// Adds the gradients of the service's net to the module.
void bind_text(nanobind::module_& m);

}  // namespace slipstream
