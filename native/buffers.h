#pragma once

// Buffers from Python are checked here, so that the kernels need not check them.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace slipstream {

namespace nb = nanobind;

[[noreturn]] inline void refuse(const std::string& message) { throw nb::value_error(message.c_str()); }

// The bytes of a C-contiguous buffer, held for as long as this object lives.
class Buffer {
  public:
    enum class Access { read, write };

    // `name` is the argument's name, for messages.
    Buffer(nb::handle object, const std::string& name, Access access) {
        if (!PyObject_CheckBuffer(object.ptr())) {
            const auto type = nb::cast<std::string>(nb::type_name(object.type()));
            throw nb::type_error((name + " must offer the buffer protocol, not " + type).c_str());
        }
        const bool writes = access == Access::write;
        if (PyObject_GetBuffer(object.ptr(), &view_, writes ? PyBUF_WRITABLE : PyBUF_SIMPLE) == 0)
            return;
        // Exporters disagree on the exception with which they refuse.
        const nb::python_error cause;
        refuse(name + " must be " + (writes ? "writable and " : "") + "C-contiguous: " +
               nb::str(cause.value()).c_str());
    }

    // An exporter may point into the view that it filled, so the view must not move.
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() { PyBuffer_Release(&view_); }

    std::byte* data() const { return static_cast<std::byte*>(view_.buf); }
    std::size_t nbytes() const { return static_cast<std::size_t>(view_.len); }

  private:
    Py_buffer view_{};
};

inline bool overlap(const Buffer& one, const Buffer& other) {
    const auto a = reinterpret_cast<std::uintptr_t>(one.data());
    const auto b = reinterpret_cast<std::uintptr_t>(other.data());
    return a < b + other.nbytes() && b < a + one.nbytes();
}

}  // namespace slipstream
