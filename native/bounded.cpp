#include "bounded.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <optional>
#include <span>

#include "quantize.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define SLIPSTREAM_AVX2 __attribute__((target("avx2,popcnt")))
#endif

// A function that a function for one processor calls must be inlined into it, to be compiled for it.
#define SLIPSTREAM_INLINE __attribute__((always_inline)) inline

namespace slipstream {
namespace {

static_assert(std::endian::native == std::endian::little, "frames are memory as it stands");

constexpr std::size_t kLanes = 8;

enum class Form : std::uint8_t { dense = 1, bitmap = 2, indexes = 3 };

struct Header {
    Form form;
    BoundedValues values;
    std::uint8_t squeeze = 0;
    std::uint8_t zero = 0;
    std::uint32_t kept;
    std::uint32_t body;
};
static_assert(sizeof(Header) == kBoundedHeader);

template <class T>
SLIPSTREAM_INLINE T load(const std::byte* data, std::size_t index) noexcept {
    T value;
    std::memcpy(&value, data + index * sizeof(T), sizeof(T));
    return value;
}

template <class T>
SLIPSTREAM_INLINE void store(std::byte* data, std::size_t index, T value) noexcept {
    std::memcpy(data + index * sizeof(T), &value, sizeof(T));
}

constexpr std::size_t bitmap_nbytes(std::size_t count) { return (count + 7) / 8; }

float one_nan(float value) noexcept {
    return value == value ? value : std::bit_cast<float>(0x7FC00000u);
}

// By mask, since a branch on whether a value is sent would be mispredicted half of the time.
float either(bool first, float one, float other) noexcept {
    const std::uint32_t mask = 0u - std::uint32_t{first};
    return std::bit_cast<float>((std::bit_cast<std::uint32_t>(one) & mask) |
                                (std::bit_cast<std::uint32_t>(other) & ~mask));
}

constexpr std::uint32_t kMagnitude = 0x7FFFFFFFu;
constexpr std::uint32_t kInfinity = 0x7F800000u;
// Beyond this a finite float would round to an infinite bfloat16.
constexpr std::uint32_t kRoundsToFinite = 0x7F7F7FFFu;

// The value that is sent, and the remainder.
struct Float32 {
    using Stored = float;
    static constexpr BoundedValues kValues = BoundedValues::float32;
    static float narrow(float acc) noexcept { return acc; }
    static float widen(float stored) noexcept { return stored; }
    static float left(float, float) noexcept { return 0.0f; }
};

struct BFloat16 {
    using Stored = std::uint16_t;
    static constexpr BoundedValues kValues = BoundedValues::bfloat16;
    static std::uint16_t narrow(float acc) noexcept {
        const auto bits = std::bit_cast<std::uint32_t>(acc);
        std::uint32_t magnitude = bits & kMagnitude;
        if (magnitude < kInfinity) magnitude = std::min(magnitude, kRoundsToFinite);
        magnitude += 0x7FFFu + (magnitude >> 16 & 1u);
        return static_cast<std::uint16_t>((magnitude | (bits & ~kMagnitude)) >> 16);
    }
    static float widen(std::uint16_t stored) noexcept {
        return std::bit_cast<float>(std::uint32_t{stored} << 16);
    }
    static float left(float acc, std::uint16_t stored) noexcept {
        const bool finite = (std::bit_cast<std::uint32_t>(acc) & kMagnitude) < kInfinity;
        return either(finite, acc - widen(stored), 0.0f);
    }
};

// Values of few bits: runs of kBoundedBlock.
constexpr CodeBits code_bits(BoundedValues values) {
    return values == BoundedValues::int8 ? CodeBits::eight : CodeBits::four;
}

constexpr bool has_few_bits(BoundedValues values) {
    return values == BoundedValues::int8 || values == BoundedValues::int4;
}

constexpr std::size_t run_nbytes(std::size_t count, CodeBits bits) {
    return quantized_nbytes(count, bits, kBoundedBlock);
}

constexpr std::size_t values_nbytes(std::size_t kept, BoundedValues values) {
    if (!has_few_bits(values)) return kept * (values == BoundedValues::float32 ? 4 : 2);
    const CodeBits bits = code_bits(values);
    const std::size_t rest = kept % kBoundedBlock;
    return kept / kBoundedBlock * run_nbytes(kBoundedBlock, bits) +
           (rest == 0 ? 0 : run_nbytes(rest, bits));
}

SLIPSTREAM_INLINE std::size_t count_bits(const std::byte* bits, std::size_t nbytes) noexcept {
    std::size_t found = 0;
    for (std::size_t i = 0; i < nbytes / 8; ++i)
        found += static_cast<std::size_t>(std::popcount(load<std::uint64_t>(bits, i)));
    for (std::size_t i = nbytes - nbytes % 8; i < nbytes; ++i)
        found += static_cast<std::size_t>(std::popcount(load<std::uint8_t>(bits, i)));
    return found;
}

// The loops that take the time, over any number of values; a path has all of them.
struct Portable {
    static constexpr QuantizePack& quantize = quantize_pack_portable;
    static constexpr QuantizeUnpack& dequantize = quantize_unpack_portable;

    // Splits gradient + residual into the values sent, with their bits, and the residual; returns how
    // many are sent. `values` has room for all.
    template <class Wire>
    static std::size_t filter(std::byte* values, std::byte* bits, const std::byte* gradient,
                              std::byte* residual, std::size_t count, float delta,
                              std::size_t ties) noexcept {
        std::size_t kept = 0;
        for (std::size_t start = 0; start < count; start += kLanes) {
            const std::size_t stop = std::min(start + kLanes, count);
            unsigned byte = 0;
            for (std::size_t i = start; i < stop; ++i) {
                const float acc = one_nan(load<float>(gradient, i) + load<float>(residual, i));
                const bool tied = ties != 0 && std::fabs(acc) == delta;
                const bool travels = !(std::fabs(acc) <= delta) || tied;
                ties -= tied;
                const auto sent = Wire::narrow(acc);
                store(residual, i, either(travels, Wire::left(acc, sent), acc));
                // Always stored, and overwritten unless it is sent: no branch here either.
                store(values, kept, sent);
                kept += travels;
                byte |= unsigned{travels} << (i - start);
            }
            bits[start / 8] = static_cast<std::byte>(byte);
        }
        return kept;
    }

    static void add_one(std::byte* out, std::size_t index, float value) noexcept {
        const float before = load<float>(out, index);
        store(out, index, value == 0.0f ? before : one_nan(before + value));
    }

    template <class Wire>
    static void add_dense(std::byte* out, const std::byte* values, std::size_t count) noexcept {
        for (std::size_t i = 0; i < count; ++i)
            add_one(out, i, Wire::widen(load<typename Wire::Stored>(values, i)));
    }

    // Adds values where bits are set, `kept` of them at most; returns how many were added.
    template <class Wire>
    static std::size_t add_bitmap(std::byte* out, const std::byte* values, std::size_t kept,
                                  const std::byte* bits, std::size_t count) noexcept {
        std::size_t used = 0;
        for (std::size_t start = 0; start < count; start += kLanes) {
            auto byte = load<std::uint8_t>(bits, start / 8);
            for (; byte != 0 && used < kept; byte &= static_cast<std::uint8_t>(byte - 1)) {
                const std::size_t i = start + static_cast<std::size_t>(std::countr_zero(byte));
                if (i >= count) break;
                add_one(out, i, Wire::widen(load<typename Wire::Stored>(values, used++)));
            }
        }
        return used;
    }

    static std::size_t count_set(const std::byte* bits, std::size_t nbytes) noexcept {
        return count_bits(bits, nbytes);
    }
};

#if defined(SLIPSTREAM_AVX2)

// For every byte of bits, a byte for each lane. Compressing: the source of lane k's value, those with
// set bits first. Expanding: which of the packed values lane k gets, negative if none.
struct Permutations {
    std::array<std::uint64_t, 256> compress{}, expand{};

    constexpr Permutations() {
        for (unsigned byte = 0; byte < 256; ++byte) {
            unsigned rank = 0;
            for (unsigned lane = 0; lane < kLanes; ++lane) {
                const bool set = byte >> lane & 1u;
                if (set) compress[byte] |= std::uint64_t{lane} << (8 * rank);
                expand[byte] |= std::uint64_t{set ? rank : 0x80u} << (8 * lane);
                rank += set;
            }
        }
    }
};
constexpr Permutations kPermutations;

// Eight values at a time, which is a byte of bits; Portable does the rest.
struct Avx2 {
    SLIPSTREAM_AVX2 static __m256 floats(const std::byte* data, std::size_t index) noexcept {
        return _mm256_loadu_ps(reinterpret_cast<const float*>(data) + index);
    }
    SLIPSTREAM_AVX2 static void put(std::byte* data, std::size_t index, __m256 value) noexcept {
        _mm256_storeu_ps(reinterpret_cast<float*>(data) + index, value);
    }
    SLIPSTREAM_AVX2 static __m256i places(std::uint64_t bytes) noexcept {
        return _mm256_cvtepi8_epi32(_mm_cvtsi64_si128(static_cast<long long>(bytes)));
    }
    SLIPSTREAM_AVX2 static __m256 with_one_nan(__m256 value) noexcept {
        const __m256 nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FC00000));
        return _mm256_blendv_ps(value, nan, _mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    }

    // A bfloat16 as the upper half of a float, which can be computed with.
    SLIPSTREAM_AVX2 static __m256 narrow(Float32, __m256 acc) noexcept { return acc; }
    SLIPSTREAM_AVX2 static __m256 narrow(BFloat16, __m256 acc) noexcept {
        const __m256i bits = _mm256_castps_si256(acc);
        const __m256i sign = _mm256_andnot_si256(_mm256_set1_epi32(kMagnitude), bits);
        const __m256i all = _mm256_and_si256(_mm256_set1_epi32(kMagnitude), bits);
        const __m256i finite = _mm256_cmpgt_epi32(_mm256_set1_epi32(kInfinity), all);
        const __m256i least = _mm256_min_epi32(all, _mm256_set1_epi32(kRoundsToFinite));
        const __m256i magnitude = _mm256_blendv_epi8(all, least, finite);
        const __m256i odd =
            _mm256_and_si256(_mm256_srli_epi32(magnitude, 16), _mm256_set1_epi32(1));
        const __m256i half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF));
        const __m256i rounded = _mm256_or_si256(_mm256_add_epi32(magnitude, half), sign);
        return _mm256_castsi256_ps(
            _mm256_andnot_si256(_mm256_set1_epi32(0xFFFF), rounded));
    }

    SLIPSTREAM_AVX2 static __m256 left(Float32, __m256, __m256) noexcept {
        return _mm256_setzero_ps();
    }
    SLIPSTREAM_AVX2 static __m256 left(BFloat16, __m256 acc, __m256 sent) noexcept {
        const __m256i magnitude =
            _mm256_and_si256(_mm256_set1_epi32(kMagnitude), _mm256_castps_si256(acc));
        const __m256i finite = _mm256_cmpgt_epi32(_mm256_set1_epi32(kInfinity), magnitude);
        return _mm256_and_ps(_mm256_castsi256_ps(finite), _mm256_sub_ps(acc, sent));
    }

    SLIPSTREAM_AVX2 static void put(Float32, std::byte* values, std::size_t index,
                                    __m256 sent) noexcept {
        put(values, index, sent);
    }
    SLIPSTREAM_AVX2 static void put(BFloat16, std::byte* values, std::size_t index,
                                    __m256 sent) noexcept {
        const __m256i upper = _mm256_srli_epi32(_mm256_castps_si256(sent), 16);
        const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(upper),
                                                _mm256_extracti128_si256(upper, 1));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(values + index * 2), packed);
    }

    SLIPSTREAM_AVX2 static __m256 get(Float32, const std::byte* values,
                                      std::size_t index) noexcept {
        return floats(values, index);
    }
    SLIPSTREAM_AVX2 static __m256 get(BFloat16, const std::byte* values,
                                      std::size_t index) noexcept {
        const __m128i packed =
            _mm_loadu_si128(reinterpret_cast<const __m128i*>(values + index * 2));
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(packed), 16));
    }

    static constexpr QuantizePack& quantize = quantize_pack;
    static constexpr QuantizeUnpack& dequantize = quantize_unpack;

    // Lanes whose bit is set.
    SLIPSTREAM_AVX2 static __m256 lanes(unsigned byte) noexcept {
        const __m256i one = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
        const __m256i set = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(byte)), one);
        return _mm256_castsi256_ps(_mm256_cmpeq_epi32(set, one));
    }

    // All eight lanes are stored; the next store overwrites those that are not sent. At most i values
    // are sent before value i, so there is room.
    template <class Wire>
    SLIPSTREAM_AVX2 static std::size_t filter(std::byte* values, std::byte* bits,
                                              const std::byte* gradient, std::byte* residual,
                                              std::size_t count, float delta,
                                              std::size_t ties) noexcept {
        const std::size_t whole = count - count % kLanes;
        const __m256 bound = _mm256_set1_ps(delta);
        const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(kMagnitude));
        std::size_t kept = 0;
        for (std::size_t i = 0; i < whole; i += kLanes) {
            const __m256 acc =
                with_one_nan(_mm256_add_ps(floats(gradient, i), floats(residual, i)));
            const __m256 size = _mm256_and_ps(acc, magnitude);
            __m256 travels = _mm256_cmp_ps(size, bound, _CMP_NLE_UQ);
            auto byte = static_cast<unsigned>(_mm256_movemask_ps(travels));
            if (ties != 0) {
                auto tied = static_cast<unsigned>(
                    _mm256_movemask_ps(_mm256_cmp_ps(size, bound, _CMP_EQ_OQ)));
                for (; tied != 0 && ties != 0; tied &= tied - 1, --ties) byte |= tied & -tied;
                travels = lanes(byte);
            }
            const __m256 sent = narrow(Wire{}, acc);
            put(residual, i, _mm256_blendv_ps(acc, left(Wire{}, acc, sent), travels));
            const __m256i first = places(kPermutations.compress[byte]);
            put(Wire{}, values, kept, _mm256_permutevar8x32_ps(sent, first));
            bits[i / 8] = static_cast<std::byte>(byte);
            kept += static_cast<std::size_t>(std::popcount(byte));
        }
        return kept + Portable::filter<Wire>(values + kept * sizeof(typename Wire::Stored),
                                             bits + whole / 8, gradient + whole * sizeof(float),
                                             residual + whole * sizeof(float), count - whole,
                                             delta, ties);
    }

    SLIPSTREAM_AVX2 static void add(std::byte* out, std::size_t index, __m256 value) noexcept {
        const __m256 before = floats(out, index);
        const __m256 zero = _mm256_cmp_ps(value, _mm256_setzero_ps(), _CMP_EQ_OQ);
        const __m256 sum = with_one_nan(_mm256_add_ps(before, value));
        put(out, index, _mm256_blendv_ps(sum, before, zero));
    }

    template <class Wire>
    SLIPSTREAM_AVX2 static void add_dense(std::byte* out, const std::byte* values,
                                          std::size_t count) noexcept {
        const std::size_t whole = count - count % kLanes;
        for (std::size_t i = 0; i < whole; i += kLanes) add(out, i, get(Wire{}, values, i));
        Portable::add_dense<Wire>(out + whole * sizeof(float),
                                  values + whole * sizeof(typename Wire::Stored), count - whole);
    }

    // Eight values are read if so many remain.
    template <class Wire>
    SLIPSTREAM_AVX2 static std::size_t add_bitmap(std::byte* out, const std::byte* values,
                                                  std::size_t kept, const std::byte* bits,
                                                  std::size_t count) noexcept {
        std::size_t used = 0, i = 0;
        for (; i + kLanes <= count && used + kLanes <= kept; i += kLanes) {
            const auto byte = load<std::uint8_t>(bits, i / 8);
            const __m256i which = places(kPermutations.expand[byte]);
            const __m256 spread = _mm256_permutevar8x32_ps(get(Wire{}, values, used), which);
            const __m256 none = _mm256_castsi256_ps(_mm256_srai_epi32(which, 31));
            add(out, i, _mm256_andnot_ps(none, spread));
            used += static_cast<std::size_t>(std::popcount(byte));
        }
        return used + Portable::add_bitmap<Wire>(out + i * sizeof(float),
                                                 values + used * sizeof(typename Wire::Stored),
                                                 kept - used, bits + i / 8, count - i);
    }

    SLIPSTREAM_AVX2 static std::size_t count_set(const std::byte* bits,
                                                 std::size_t nbytes) noexcept {
        return count_bits(bits, nbytes);
    }
};

bool has_avx2() noexcept {
    static const bool has = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("popcnt");
    return has;
}

#endif  // SLIPSTREAM_AVX2

// Writes the gaps before set bits as LEB128 and returns their bytes; nothing if `room` is too small.
std::optional<std::size_t> write_gaps(std::byte* out, std::size_t room, const std::byte* bits,
                                      std::size_t count) noexcept {
    std::size_t used = 0, next = 0;
    for (std::size_t start = 0; start < count; start += 64) {
        std::uint64_t word = 0;
        const std::size_t nbytes = std::min(sizeof(word), bitmap_nbytes(count - start));
        std::memcpy(&word, bits + start / 8, nbytes);
        for (; word != 0; word &= word - 1) {
            const std::size_t index = start + static_cast<std::size_t>(std::countr_zero(word));
            for (std::size_t gap = index - next;; gap >>= 7) {
                if (used == room) return std::nullopt;
                out[used++] = static_cast<std::byte>((gap & 0x7F) | (gap < 0x80 ? 0 : 0x80));
                if (gap < 0x80) break;
            }
            next = index + 1;
        }
    }
    return used;
}

// Moves `at` past a gap; returns nothing if it is cut short, or longer than necessary.
std::optional<std::size_t> read_gap(const std::byte*& at, const std::byte* end) noexcept {
    std::size_t gap = 0;
    for (unsigned shift = 0; shift < 32 && at != end; shift += 7) {
        const auto byte = std::to_integer<std::size_t>(*at++);
        gap |= (byte & 0x7F) << shift;
        if (byte == 0 && shift != 0) return std::nullopt;
        if (byte < 0x80) return gap;
    }
    return std::nullopt;
}

// Calls use(k, the index of value k); returns the reason if it has to stop.
template <class Use>
const char* each_index(const std::byte* gaps, std::size_t nbytes, std::size_t kept,
                       std::size_t count, Use use) noexcept {
    const std::byte* const end = gaps + nbytes;
    std::size_t next = 0;
    for (std::size_t k = 0; k < kept; ++k) {
        const auto gap = read_gap(gaps, end);
        if (!gap) return "an index is cut short, or longer than it need be";
        const std::size_t index = next + *gap;
        if (index >= count) return "an index is beyond the last value";
        use(k, index);
        next = index + 1;
    }
    return gaps == end ? nullptr : "bytes are left over behind the indexes";
}

// Expands packed values to one for every element, in the same memory. It starts at the end: no value
// moves to an element before its own, so none is overwritten before it has moved.
template <class T>
void spread(std::byte* values, std::size_t kept, const std::byte* bits,
            std::size_t count) noexcept {
    std::size_t stop = count;
    while (kept < stop) {  // otherwise those before `stop` are in place
        const std::size_t start = (stop - 1) / kLanes * kLanes;
        const auto byte = load<std::uint8_t>(bits, start / 8);
        if (byte == 0xFF) {
            kept -= kLanes;
            std::memmove(values + start * sizeof(T), values + kept * sizeof(T), kLanes * sizeof(T));
        } else {
            for (std::size_t i = stop; i-- > start;)
                store(values, i, byte >> (i - start) & 1u ? load<T>(values, --kept) : T{0});
        }
        stop = start;
    }
}

// Calls use(the index) for every set bit, in order.
template <class Use>
void each_set(const std::byte* bits, std::size_t count, Use use) noexcept {
    for (std::size_t start = 0; start < count; start += 64) {
        std::uint64_t word = 0;
        std::memcpy(&word, bits + start / 8, std::min(sizeof(word), bitmap_nbytes(count - start)));
        for (; word != 0; word &= word - 1)
            use(start + static_cast<std::size_t>(std::countr_zero(word)));
    }
}

// Turns packed floats into runs of few bits in the same memory: a run is smaller than its floats,
// which are copied first. Rounding errors are added to the residual, at the index of each value.
template <class Path>
void shorten(std::byte* values, std::size_t kept, const std::byte* bits, std::size_t count,
             std::byte* residual, CodeBits width) noexcept {
    constexpr float zeros[kBoundedBlock] = {};
    float left[kBoundedBlock];
    std::size_t done = 0, place = kBoundedBlock;
    std::byte* out = values;
    each_set(bits, count, [&](std::size_t index) {
        if (place == kBoundedBlock) {
            const std::size_t length = std::min(kBoundedBlock, kept - done);
            std::memcpy(left, values + done * sizeof(float), length * sizeof(float));
            Path::quantize(out, reinterpret_cast<const std::byte*>(zeros),
                           reinterpret_cast<std::byte*>(left), length, width, kBoundedBlock,
                           std::nullopt);
            out += run_nbytes(length, width);
            done += length;
            place = 0;
        }
        const float rest = left[place++];
        store(residual, index, either(std::isfinite(rest), rest, 0.0f));
    });
}

// The bits are stored after the room for all values. So each form can be written in its final memory:
// values that move apart do not reach the bits, and gaps are only used if there are few values.
template <class Path, class Wire>
std::size_t pack(std::byte* out, const std::byte* gradient, std::byte* residual, std::size_t count,
                 float delta, std::size_t ties, BoundedValues kind) noexcept {
    constexpr std::size_t size = sizeof(typename Wire::Stored);
    const std::size_t bitmap = bitmap_nbytes(count);
    std::byte* const values = out + kBoundedHeader;
    std::byte* const bits = values + bounded_values_room(count, kind);
    const auto kept =
        Path::template filter<Wire>(values, bits, gradient, residual, count, delta, ties);
    const bool few = has_few_bits(kind);
    if (few) shorten<Path>(values, kept, bits, count, residual, code_bits(kind));
    const std::size_t packed = values_nbytes(kept, kind);
    std::byte* const after = values + packed;

    Header header{.form = Form::bitmap, .values = kind, .kept = 0, .body = 0};
    header.kept = static_cast<std::uint32_t>(kept);
    std::size_t body = packed + bitmap;
    if (!few && count * size < body) {
        header.form = Form::dense;
        header.kept = static_cast<std::uint32_t>(count);
        body = count * size;
        spread<typename Wire::Stored>(values, kept, bits, count);
    } else if (const auto gaps = kept < bitmap ? write_gaps(after, bitmap - 1, bits, count)
                                               : std::nullopt) {
        header.form = Form::indexes;
        body = packed + *gaps;
    } else {
        std::memmove(after, bits, bitmap);
    }
    header.body = static_cast<std::uint32_t>(body);
    store(out, 0, header);
    return kBoundedHeader + body;
}

template <class Path>
std::size_t pack(std::byte* out, const std::byte* gradient, std::byte* residual, std::size_t count,
                 float delta, std::size_t ties, BoundedValues values) noexcept {
    return values == BoundedValues::bfloat16
               ? pack<Path, BFloat16>(out, gradient, residual, count, delta, ties, values)
               : pack<Path, Float32>(out, gradient, residual, count, delta, ties, values);
}

template <class Path>
const char* check_bitmap(const std::byte* bits, std::size_t nbytes, std::size_t kept,
                         std::size_t count) noexcept {
    if (nbytes != bitmap_nbytes(count)) return "its bitmap has another size than its values need";
    if (Path::count_set(bits, nbytes) != kept) return "its bitmap and its header count differently";
    if (count % 8 != 0 && load<std::uint8_t>(bits, count / 8) >> count % 8 != 0)
        return "its bitmap has bits of no value";
    return nullptr;
}

template <class Path>
const char* check_body(const std::byte* body, const Header& header, std::size_t count) noexcept {
    const std::size_t values = values_nbytes(header.kept, header.values);
    if (header.body < values) return "its values are cut short";
    const std::byte* const after = body + values;
    const std::size_t rest = header.body - values;
    switch (header.form) {
        case Form::dense:
            if (has_few_bits(header.values)) return "it is dense, which few bits are not sent as";
            return header.kept == count && rest == 0 ? nullptr : "it is dense, not of all values";
        case Form::bitmap:
            return check_bitmap<Path>(after, rest, header.kept, count);
        case Form::indexes:
            return each_index(after, rest, header.kept, count, [](std::size_t, std::size_t) {});
    }
    return "its form is unknown";
}

// The header is read once, into `header`, which stays the same whatever happens to the frame.
template <class Path>
const char* check(const std::byte* frame, std::size_t nbytes, std::size_t count,
                  Header& header) noexcept {
    if (nbytes < kBoundedHeader) return "it is shorter than a header";
    header = load<Header>(frame, 0);
    if (header.values < BoundedValues::float32 || header.values > BoundedValues::int4)
        return "the type of its values is unknown";
    if (header.squeeze != 0) return "it is squeezed";
    if (header.zero != 0) return "byte 3 of its header is not 0";
    if (header.kept > count) return "it has more values than there are elements";
    if (header.body != nbytes - kBoundedHeader) return "its body is not as long as its header says";
    return check_body<Path>(frame + kBoundedHeader, header, count);
}

// The action on a part of the destination before values are added to it.
struct Leave {
    void operator()(std::byte*, std::size_t) const noexcept {}
};
struct Clear {
    void operator()(std::byte* out, std::size_t count) const noexcept {
        std::memset(out, 0, count * sizeof(float));
    }
};

// A cleared part is still in the first-level cache when values are added to it. A multiple of 8, since
// blocks begin with a byte.
constexpr std::size_t kBlock = 2048;

template <class Path, class Wire, class Before>
void unpack(std::byte* out, const std::byte* values, const Header& header, std::size_t count,
            Before before) noexcept {
    using Stored = typename Wire::Stored;
    const std::byte* const after = values + header.kept * sizeof(Stored);
    if (header.form == Form::indexes) {
        before(out, count);
        each_index(after, header.body - header.kept * sizeof(Stored), header.kept, count,
                   [=](std::size_t k, std::size_t index) {
                       Portable::add_one(out, index, Wire::widen(load<Stored>(values, k)));
                   });
        return;
    }
    std::size_t used = 0;
    for (std::size_t start = 0; start < count; start += kBlock) {
        const std::size_t length = std::min(kBlock, count - start);
        std::byte* const block = out + start * sizeof(float);
        const std::byte* const left = values + used * sizeof(Stored);
        before(block, length);
        if (header.form == Form::dense) {
            Path::template add_dense<Wire>(block, left, length);
            used += length;
        } else {
            used += Path::template add_bitmap<Wire>(block, left, header.kept - used,
                                                    after + start / 8, length);
        }
    }
}

// The values of runs of few bits, one after the other.
template <class Path>
class FewBits {
public:
    FewBits(const std::byte* runs, std::size_t kept, CodeBits bits) noexcept
        : at_(runs), left_(kept), bits_(bits) {}

    float next() noexcept {
        if (place_ == kBoundedBlock) {
            const std::size_t length = std::min(kBoundedBlock, left_);
            Path::dequantize(reinterpret_cast<std::byte*>(run_), std::span(&at_, 1), length, bits_,
                             kBoundedBlock, 1.0);
            at_ += run_nbytes(length, bits_);
            left_ -= length;
            place_ = 0;
        }
        return run_[place_++];
    }

private:
    const std::byte* at_;
    std::size_t left_;
    CodeBits bits_;
    std::size_t place_ = kBoundedBlock;
    float run_[kBoundedBlock];
};

template <class Path, class Before>
void unpack_few(std::byte* out, const std::byte* values, const Header& header, std::size_t count,
                Before before) noexcept {
    const std::size_t packed = values_nbytes(header.kept, header.values);
    FewBits<Path> run(values, header.kept, code_bits(header.values));
    before(out, count);
    if (header.form == Form::indexes)
        each_index(values + packed, header.body - packed, header.kept, count,
                   [&](std::size_t, std::size_t index) {
                       Portable::add_one(out, index, run.next());
                   });
    else
        each_set(values + packed, count,
                 [&](std::size_t index) {
                     if (index < count) Portable::add_one(out, index, run.next());
                 });
}

template <class Path, class Before>
const char* unpack(std::byte* out, const std::byte* frame, std::size_t nbytes,
                   std::size_t count) noexcept {
    Header header;
    if (const char* const reason = check<Path>(frame, nbytes, count, header)) return reason;
    const std::byte* const values = frame + kBoundedHeader;
    if (has_few_bits(header.values))
        unpack_few<Path>(out, values, header, count, Before{});
    else if (header.values == BoundedValues::float32)
        unpack<Path, Float32>(out, values, header, count, Before{});
    else
        unpack<Path, BFloat16>(out, values, header, count, Before{});
    return nullptr;
}

}  // namespace

std::size_t bounded_pack_portable(std::byte* out, const std::byte* gradient, std::byte* residual,
                                  std::size_t count, float delta, std::size_t ties,
                                  BoundedValues values) noexcept {
    return pack<Portable>(out, gradient, residual, count, delta, ties, values);
}

const char* bounded_add_portable(std::byte* out, const std::byte* frame, std::size_t nbytes,
                                 std::size_t count) noexcept {
    return unpack<Portable, Leave>(out, frame, nbytes, count);
}

const char* bounded_write_portable(std::byte* out, const std::byte* frame, std::size_t nbytes,
                                   std::size_t count) noexcept {
    return unpack<Portable, Clear>(out, frame, nbytes, count);
}

std::size_t bounded_pack(std::byte* out, const std::byte* gradient, std::byte* residual,
                         std::size_t count, float delta, std::size_t ties,
                         BoundedValues values) noexcept {
#if defined(SLIPSTREAM_AVX2)
    if (has_avx2()) return pack<Avx2>(out, gradient, residual, count, delta, ties, values);
#endif
    return pack<Portable>(out, gradient, residual, count, delta, ties, values);
}

const char* bounded_check(const std::byte* frame, std::size_t nbytes, std::size_t count) noexcept {
    Header header;
#if defined(SLIPSTREAM_AVX2)
    if (has_avx2()) return check<Avx2>(frame, nbytes, count, header);
#endif
    return check<Portable>(frame, nbytes, count, header);
}

const char* bounded_add(std::byte* out, const std::byte* frame, std::size_t nbytes,
                        std::size_t count) noexcept {
#if defined(SLIPSTREAM_AVX2)
    if (has_avx2()) return unpack<Avx2, Leave>(out, frame, nbytes, count);
#endif
    return unpack<Portable, Leave>(out, frame, nbytes, count);
}

const char* bounded_write(std::byte* out, const std::byte* frame, std::size_t nbytes,
                          std::size_t count) noexcept {
#if defined(SLIPSTREAM_AVX2)
    if (has_avx2()) return unpack<Avx2, Clear>(out, frame, nbytes, count);
#endif
    return unpack<Portable, Clear>(out, frame, nbytes, count);
}

}  // namespace slipstream
