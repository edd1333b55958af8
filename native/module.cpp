// The Python interface of the kernels: buffers are checked here, so that kernels need not.

#include "buffers.h"

#include <nanobind/stl/optional.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "bounded.h"
#include "crc32c.h"
#include "largest.h"
#include "low_rank.h"
#include "mean.h"
#include "one_bit.h"
#include "quantize.h"
#include "shared.h"
#include "text_module.h"

namespace nb = nanobind;
using namespace nb::literals;
using slipstream::Buffer;
using slipstream::overlap;
using slipstream::refuse;

namespace {

struct Number {
    const char* name;
    std::size_t itemsize;
    slipstream::Format format;
};

constexpr Number kNumbers[] = {
    {"float32", 4, slipstream::Format::float32},
    {"float64", 8, slipstream::Format::float64},
    {"bfloat16", 2, slipstream::Format::bfloat16},
    {"float16", 2, slipstream::Format::float16},
};

const Number& number_for(const std::string& dtype) {
    for (const Number& number : kNumbers)
        if (dtype == number.name) return number;
    refuse("dtype must be float32, float64, bfloat16 or float16, not '" + dtype + "'");
}

void check_divisor(double divisor, bool in_double) {
    const double rounded = in_double ? divisor : static_cast<float>(divisor);
    if (!std::isfinite(rounded) || rounded == 0.0)
        refuse("divisor must be finite and nonzero in the precision of the sum, not " +
               nb::cast<std::string>(nb::repr(nb::float_(divisor))));
}

// A block of `out` is written after that block of every input has been read. With a shifted overlap,
// or one of items of another size, means would be read as input.
bool overlaps_badly(const Buffer& out, const Buffer& input, bool same_itemsize) {
    return !(out.data() == input.data() && same_itemsize) && overlap(out, input);
}

void mean_into(nb::handle out, nb::sequence inputs, const std::string& dtype, double divisor,
               const std::optional<std::string>& out_dtype) {
    const Number& in = number_for(dtype);
    const Number& written = number_for(out_dtype.value_or(dtype));
    check_divisor(divisor, in.itemsize == 8 || written.itemsize == 8);
    const Buffer target(out, "out", Buffer::Access::write);
    if (target.nbytes() % written.itemsize != 0)
        refuse("out has " + std::to_string(target.nbytes()) + " bytes, not a multiple of the " +
               std::to_string(written.itemsize) + " of a " + written.name);
    const std::size_t count = target.nbytes() / written.itemsize;

    std::deque<Buffer> held;
    std::vector<const std::byte*> sources;
    for (nb::handle input : inputs) {
        const std::string name = "inputs[" + std::to_string(held.size()) + "]";
        const Buffer& source = held.emplace_back(input, name, Buffer::Access::read);
        if (source.nbytes() != count * in.itemsize)
            refuse(name + " has " + std::to_string(source.nbytes()) + " bytes, out has " +
                   std::to_string(target.nbytes()));
        if (overlaps_badly(target, source, in.itemsize == written.itemsize))
            refuse(name + " overlaps out without being the same memory");
        sources.push_back(source.data());
    }
    if (sources.empty()) refuse("inputs must not be empty");

    const nb::gil_scoped_release unlocked;
    slipstream::mean_kernel(in.format, written.format)(target.data(), sources, count, divisor);
}

double largest(nb::handle data, const std::string& dtype) {
    const Number& number = number_for(dtype);
    const Buffer buffer(data, "data", Buffer::Access::read);
    if (buffer.nbytes() % number.itemsize != 0)
        refuse("data has " + std::to_string(buffer.nbytes()) + " bytes, not a multiple of the " +
               std::to_string(number.itemsize) + " of a " + number.name);
    const nb::gil_scoped_release unlocked;
    return slipstream::largest(number.format, buffer.data(), buffer.nbytes() / number.itemsize);
}

std::size_t count_floats(const Buffer& buffer, const char* name) {
    if (buffer.nbytes() % sizeof(float) != 0)
        refuse(std::string(name) + " has " + std::to_string(buffer.nbytes()) +
               " bytes, not a multiple of the 4 of a float32");
    return buffer.nbytes() / sizeof(float);
}

// Floats in memory that the kernels may read and write directly.
float* floats_of(const Buffer& buffer, const char* name) {
    if (reinterpret_cast<std::uintptr_t>(buffer.data()) % alignof(float) != 0)
        refuse(std::string(name) + " must be aligned to the 4 bytes of a float32");
    return reinterpret_cast<float*>(buffer.data());
}

// Floats at any address; vectors are few, so a copy costs little.
std::vector<float> vectors_of(nb::handle object, const char* name, std::size_t count) {
    const Buffer source(object, name, Buffer::Access::read);
    if (count_floats(source, name) != count)
        refuse(std::string(name) + " has " + std::to_string(source.nbytes()) + " bytes where " +
               std::to_string(count) + " float32 are needed");
    std::vector<float> copied(count);
    std::memcpy(copied.data(), source.data(), source.nbytes());
    return copied;
}

slipstream::LowRankShape low_rank_shape(std::size_t count, std::size_t rows, std::size_t rank) {
    if (rows == 0 || count == 0 || count % rows != 0)
        refuse(std::to_string(count) + " values are no matrix of " + std::to_string(rows) + " rows");
    if (rank == 0 || rank > count) refuse("rank must be from 1 to the number of values");
    return {rows, count / rows, rank};
}

void low_rank_pack(nb::handle factor, nb::handle gradient, nb::handle residual, nb::handle basis,
                   std::size_t rows, std::size_t rank, bool left) {
    const Buffer target(factor, "factor", Buffer::Access::write);
    const Buffer source(gradient, "gradient", Buffer::Access::read);
    const Buffer kept(residual, "residual", Buffer::Access::write);
    const auto shape = low_rank_shape(count_floats(source, "gradient"), rows, rank);
    if (kept.nbytes() != source.nbytes())
        refuse("residual has " + std::to_string(kept.nbytes()) + " bytes, gradient has " +
               std::to_string(source.nbytes()));
    const std::size_t length = left ? shape.columns : shape.rows;
    if (count_floats(target, "factor") != rank * length)
        refuse("factor has " + std::to_string(target.nbytes()) + " bytes where " +
               std::to_string(rank * length) + " float32 are needed");
    if (overlap(target, source) || overlap(target, kept) || overlap(source, kept))
        refuse("factor, gradient and residual must not overlap");
    const auto vectors = vectors_of(basis, "basis", rank * (left ? shape.rows : shape.columns));
    float* to = floats_of(target, "factor");
    const float* from = floats_of(source, "gradient");
    float* rest = floats_of(kept, "residual");

    const nb::gil_scoped_release unlocked;
    slipstream::low_rank_pack(to, from, rest, vectors.data(), shape, left);
}

void low_rank_unpack(nb::handle out, nb::handle u, nb::handle v, std::size_t rows,
                     std::size_t rank) {
    const Buffer target(out, "out", Buffer::Access::write);
    const auto shape = low_rank_shape(count_floats(target, "out"), rows, rank);
    const auto along_columns = vectors_of(u, "u", rank * shape.rows);
    const auto along_rows = vectors_of(v, "v", rank * shape.columns);
    float* to = floats_of(target, "out");

    const nb::gil_scoped_release unlocked;
    slipstream::low_rank_unpack(to, along_columns.data(), along_rows.data(), shape);
}

void check_packed(const Buffer& packed, const std::string& name, std::size_t count) {
    if (packed.nbytes() != slipstream::one_bit_nbytes(count))
        refuse(name + " has " + std::to_string(packed.nbytes()) + " bytes where " +
               std::to_string(count) + " values take " +
               std::to_string(slipstream::one_bit_nbytes(count)));
}

template <auto Pack>
void one_bit_pack(nb::handle out, nb::handle gradient, nb::handle residual) {
    const Buffer target(out, "out", Buffer::Access::write);
    const Buffer source(gradient, "gradient", Buffer::Access::read);
    const Buffer kept(residual, "residual", Buffer::Access::write);
    const std::size_t count = count_floats(source, "gradient");
    if (kept.nbytes() != source.nbytes())
        refuse("residual has " + std::to_string(kept.nbytes()) + " bytes, gradient has " +
               std::to_string(source.nbytes()));
    check_packed(target, "out", count);
    if (overlap(target, source) || overlap(target, kept) || overlap(source, kept))
        refuse("out, gradient and residual must not overlap");

    const nb::gil_scoped_release unlocked;
    Pack(target.data(), source.data(), kept.data(), count);
}

template <auto Unpack>
void one_bit_unpack(nb::handle out, nb::sequence inputs, double divisor) {
    check_divisor(divisor, false);
    const Buffer target(out, "out", Buffer::Access::write);
    const std::size_t count = count_floats(target, "out");

    std::deque<Buffer> held;
    std::vector<const std::byte*> sources;
    for (nb::handle input : inputs) {
        const std::string name = "inputs[" + std::to_string(held.size()) + "]";
        const Buffer& source = held.emplace_back(input, name, Buffer::Access::read);
        check_packed(source, name, count);
        if (overlap(target, source)) refuse(name + " overlaps out");
        sources.push_back(source.data());
    }
    if (sources.empty()) refuse("inputs must not be empty");

    const nb::gil_scoped_release unlocked;
    Unpack(target.data(), sources, count, divisor);
}

slipstream::BoundedValues values_for(const std::string& values) {
    if (values == "float32") return slipstream::BoundedValues::float32;
    if (values == "bfloat16") return slipstream::BoundedValues::bfloat16;
    if (values == "int8") return slipstream::BoundedValues::int8;
    if (values == "int4") return slipstream::BoundedValues::int4;
    refuse("values must be float32, bfloat16, int8 or int4, not '" + values + "'");
}

void check_count(std::size_t count) {
    if (count > slipstream::kBoundedMost)
        refuse(std::to_string(count) + " values are more than the " +
               std::to_string(slipstream::kBoundedMost) + " of a frame");
}

// Returns the largest float that is not above, so that comparing floats is as with the double.
float bound_below(double delta) {
    if (!std::isfinite(delta) || delta < 0.0)
        refuse("delta must be finite and not negative, not " +
               nb::cast<std::string>(nb::repr(nb::float_(delta))));
    const auto nearest = static_cast<float>(delta);
    return nearest > delta ? std::nextafter(nearest, 0.0f) : nearest;
}

std::size_t bounded_nbytes(std::size_t count, const std::string& values) {
    check_count(count);
    return slipstream::bounded_nbytes(count, values_for(values));
}

template <auto Pack>
std::size_t bounded_pack(nb::handle out, nb::handle gradient, nb::handle residual, double delta,
                         const std::string& values, std::size_t ties) {
    const float bound = bound_below(delta);
    const slipstream::BoundedValues wire = values_for(values);
    const Buffer target(out, "out", Buffer::Access::write);
    const Buffer source(gradient, "gradient", Buffer::Access::read);
    const Buffer kept(residual, "residual", Buffer::Access::write);
    const std::size_t count = count_floats(source, "gradient");
    check_count(count);
    if (kept.nbytes() != source.nbytes())
        refuse("residual has " + std::to_string(kept.nbytes()) + " bytes, gradient has " +
               std::to_string(source.nbytes()));
    const std::size_t room = slipstream::bounded_nbytes(count, wire);
    if (target.nbytes() < room)
        refuse("out has " + std::to_string(target.nbytes()) + " bytes where " +
               std::to_string(count) + " values may take " + std::to_string(room));
    if (overlap(target, source) || overlap(target, kept) || overlap(source, kept))
        refuse("out, gradient and residual must not overlap");

    const nb::gil_scoped_release unlocked;
    return Pack(target.data(), source.data(), kept.data(), count, bound, ties, wire);
}

void refuse_frame(const Buffer& frame, std::size_t count, const char* reason) {
    if (reason != nullptr)
        refuse("frame of " + std::to_string(frame.nbytes()) + " bytes for " +
               std::to_string(count) + " values: " + reason);
}

void bounded_check(nb::handle frame, std::size_t count) {
    check_count(count);
    const Buffer source(frame, "frame", Buffer::Access::read);
    const char* reason;
    {
        const nb::gil_scoped_release unlocked;
        reason = slipstream::bounded_check(source.data(), source.nbytes(), count);
    }
    refuse_frame(source, count, reason);
}

template <auto Unpack>
void bounded_unpack(nb::handle out, nb::handle frame) {
    const Buffer target(out, "out", Buffer::Access::write);
    const Buffer source(frame, "frame", Buffer::Access::read);
    const std::size_t count = count_floats(target, "out");
    check_count(count);
    if (overlap(target, source)) refuse("frame overlaps out");
    const char* reason;
    {
        const nb::gil_scoped_release unlocked;
        reason = Unpack(target.data(), source.data(), source.nbytes(), count);
    }
    refuse_frame(source, count, reason);
}

struct Codes {
    slipstream::CodeBits bits;
    std::size_t block;

    static Codes checked(int bits, std::size_t block) {
        if (bits != 4 && bits != 8) refuse("bits must be 4 or 8, not " + std::to_string(bits));
        if (block == 0 || block > slipstream::kQuantizedBlock ||
            block % slipstream::kQuantizedUnit != 0)
            refuse("block must be a multiple of " + std::to_string(slipstream::kQuantizedUnit) +
                   ", at most " + std::to_string(slipstream::kQuantizedBlock) + ", not " +
                   std::to_string(block));
        return {slipstream::CodeBits{bits}, block};
    }

    void check(const Buffer& packed, const std::string& name, std::size_t count) const {
        const std::size_t room = slipstream::quantized_nbytes(count, bits, block);
        if (packed.nbytes() != room)
            refuse(name + " has " + std::to_string(packed.nbytes()) + " bytes where " +
                   std::to_string(count) + " values take " + std::to_string(room));
    }
};

std::size_t quantized_nbytes(std::size_t count, int bits, std::size_t block) {
    const Codes codes = Codes::checked(bits, block);
    if (count > PTRDIFF_MAX / sizeof(float)) refuse(std::to_string(count) + " values are too many");
    return slipstream::quantized_nbytes(count, codes.bits, codes.block);
}

template <auto Pack>
void quantize_pack(nb::handle out, nb::handle gradient, nb::handle residual, int bits,
                   std::size_t block, std::optional<std::uint32_t> seed) {
    const Codes codes = Codes::checked(bits, block);
    const Buffer target(out, "out", Buffer::Access::write);
    const Buffer source(gradient, "gradient", Buffer::Access::read);
    const std::size_t count = count_floats(source, "gradient");
    codes.check(target, "out", count);
    std::optional<Buffer> kept;
    if (!residual.is_none()) {
        kept.emplace(residual, "residual", Buffer::Access::write);
        if (kept->nbytes() != source.nbytes())
            refuse("residual has " + std::to_string(kept->nbytes()) + " bytes, gradient has " +
                   std::to_string(source.nbytes()));
    }
    if (overlap(target, source) || (kept && (overlap(target, *kept) || overlap(source, *kept))))
        refuse("out, gradient and residual must not overlap");

    const nb::gil_scoped_release unlocked;
    Pack(target.data(), source.data(), kept ? kept->data() : nullptr, count, codes.bits,
         codes.block, seed);
}

template <auto Unpack>
void quantize_unpack(nb::handle out, nb::sequence inputs, int bits, std::size_t block,
                     double divisor) {
    const Codes codes = Codes::checked(bits, block);
    check_divisor(divisor, false);
    const Buffer target(out, "out", Buffer::Access::write);
    const std::size_t count = count_floats(target, "out");

    std::deque<Buffer> held;
    std::vector<const std::byte*> sources;
    for (nb::handle input : inputs) {
        const std::string name = "inputs[" + std::to_string(held.size()) + "]";
        const Buffer& source = held.emplace_back(input, name, Buffer::Access::read);
        codes.check(source, name, count);
        if (overlap(target, source)) refuse(name + " overlaps out");
        sources.push_back(source.data());
    }
    if (sources.empty()) refuse("inputs must not be empty");

    const nb::gil_scoped_release unlocked;
    Unpack(target.data(), sources, count, codes.bits, codes.block, divisor);
}

template <auto Checksum>
std::uint32_t checksum(nb::handle data, std::uint32_t seed) {
    const Buffer buffer(data, "data", Buffer::Access::read);
    const nb::gil_scoped_release unlocked;
    return Checksum(buffer.data(), buffer.nbytes(), seed);
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "Kernels over raw buffers, and shared memory; all that takes long releases the GIL.";
    nb::set_leak_warnings(false);  // objects that a script still has at its end are no leak
    m.def("mean_into", &mean_into, "out"_a, "inputs"_a, "dtype"_a, "divisor"_a,
          "out_dtype"_a = nb::none(),
          "Write the sum of the inputs, taken in order, divided by `divisor`.");
    m.def("largest", &largest, "data"_a, "dtype"_a,
          "The largest magnitude; infinite or NaN if there is such a value.");
    m.def("one_bit_pack", &one_bit_pack<slipstream::one_bit_pack>, "out"_a, "gradient"_a,
          "residual"_a, "Write scales and bits of `gradient` + `residual`; keep what they leave.");
    m.def("one_bit_pack_portable", &one_bit_pack<slipstream::one_bit_pack_portable>, "out"_a,
          "gradient"_a, "residual"_a, "The same bytes, whatever the processor offers.");
    m.def("one_bit_unpack", &one_bit_unpack<slipstream::one_bit_unpack>, "out"_a, "inputs"_a,
          "divisor"_a = 1.0,
          "Write the sum of the packed inputs, taken in order, divided by `divisor`.");
    m.def("one_bit_unpack_portable", &one_bit_unpack<slipstream::one_bit_unpack_portable>,
          "out"_a, "inputs"_a, "divisor"_a = 1.0,
          "The same bytes, whatever the processor offers.");
    m.def("low_rank_pack", &low_rank_pack, "factor"_a, "gradient"_a, "residual"_a, "basis"_a,
          "rows"_a, "rank"_a, "left"_a,
          "Multiply `gradient` + `residual` with a basis; keep what the product leaves.");
    m.def("low_rank_unpack", &low_rank_unpack, "out"_a, "u"_a, "v"_a, "rows"_a, "rank"_a,
          "Write the matrix that pairs of vectors add up to.");
    m.def("quantized_nbytes", &quantized_nbytes, "count"_a, "bits"_a, "block"_a,
          "The bytes that `count` values take.");
    m.def("quantize_pack", &quantize_pack<slipstream::quantize_pack>, "out"_a, "gradient"_a,
          "residual"_a.none(), "bits"_a, "block"_a, "seed"_a = nb::none(),
          "Write scales and codes of `gradient` + `residual`; keep what they leave.");
    m.def("quantize_pack_portable", &quantize_pack<slipstream::quantize_pack_portable>, "out"_a,
          "gradient"_a, "residual"_a.none(), "bits"_a, "block"_a, "seed"_a = nb::none(),
          "The same bytes, whatever the processor offers.");
    m.def("quantize_unpack", &quantize_unpack<slipstream::quantize_unpack>, "out"_a, "inputs"_a,
          "bits"_a, "block"_a, "divisor"_a = 1.0,
          "Write the sum of the packed inputs, taken in order, divided by `divisor`.");
    m.def("quantize_unpack_portable", &quantize_unpack<slipstream::quantize_unpack_portable>,
          "out"_a, "inputs"_a, "bits"_a, "block"_a, "divisor"_a = 1.0,
          "The same bytes, whatever the processor offers.");
    m.def("bounded_nbytes", &bounded_nbytes, "count"_a, "values"_a,
          "The room that `bounded_pack` needs.");
    m.def("bounded_pack", &bounded_pack<slipstream::bounded_pack>, "out"_a, "gradient"_a,
          "residual"_a, "delta"_a, "values"_a, "ties"_a = 0,
          "Write what of `gradient` + `residual` is beyond `delta`; keep the rest.");
    m.def("bounded_pack_portable", &bounded_pack<slipstream::bounded_pack_portable>, "out"_a,
          "gradient"_a, "residual"_a, "delta"_a, "values"_a, "ties"_a = 0,
          "The same bytes, whatever the processor offers.");
    m.def("bounded_check", &bounded_check, "frame"_a, "count"_a,
          "Refuse what is not a frame of `count` values.");
    m.def("bounded_add", &bounded_unpack<slipstream::bounded_add>, "out"_a, "frame"_a,
          "Add the values of a frame to `out`.");
    m.def("bounded_add_portable", &bounded_unpack<slipstream::bounded_add_portable>, "out"_a,
          "frame"_a, "The same bytes, whatever the processor offers.");
    m.def("bounded_write", &bounded_unpack<slipstream::bounded_write>, "out"_a, "frame"_a,
          "Write the values of a frame, and 0 where it has none.");
    m.def("bounded_write_portable", &bounded_unpack<slipstream::bounded_write_portable>, "out"_a,
          "frame"_a, "The same bytes, whatever the processor offers.");
    m.def("crc32c", &checksum<slipstream::crc32c>, "data"_a, "seed"_a = 0,
          "CRC-32C of `data`, continuing the checksum `seed`.");
    m.def("crc32c_portable", &checksum<slipstream::crc32c_portable>, "data"_a, "seed"_a = 0,
          "The same checksum by table, whatever the processor offers.");
    slipstream::bind_shared(m);
    slipstream::bind_text(m);
}
