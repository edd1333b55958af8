#include "crc32c.h"

#include <array>
#include <bit>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#define SLIPSTREAM_CRC_TARGET __attribute__((target("sse4.2,crc32")))
#elif defined(__ARM_FEATURE_CRC32)  // part of the baseline, as on every Apple processor
#include <arm_acle.h>
#define SLIPSTREAM_CRC_TARGET
#elif defined(__aarch64__) && defined(__linux__) && !defined(__clang__)
// clang's arm_acle.h hides the intrinsics unless they are part of the baseline.
#include <arm_acle.h>
#include <sys/auxv.h>
#define SLIPSTREAM_CRC_TARGET __attribute__((target("+crc")))
#endif

namespace slipstream {
namespace {

constexpr std::uint32_t kPolynomial = 0x82F63B78u;

using Table = std::array<std::uint32_t, 256>;

// kSlices[k][b] is what byte b adds to the checksum when k more bytes follow it.
constexpr std::array<Table, 8> make_slices() {
    std::array<Table, 8> slices{};
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
        std::uint32_t crc = byte;
        for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? kPolynomial : 0);
        slices[0][byte] = crc;
    }
    for (std::size_t k = 1; k < 8; ++k)
        for (std::size_t byte = 0; byte < 256; ++byte) {
            const std::uint32_t before = slices[k - 1][byte];
            slices[k][byte] = (before >> 8) ^ slices[0][before & 0xFF];
        }
    return slices;
}

constexpr auto kSlices = make_slices();

// Assembled from bytes so that it is right on any byte order; compilers make it one load.
std::uint64_t load_little_endian(const std::byte* data) noexcept {
    std::uint64_t word = 0;
    for (int i = 0; i < 8; ++i) word |= std::to_integer<std::uint64_t>(data[i]) << (8 * i);
    return word;
}

#if defined(SLIPSTREAM_CRC_TARGET)

// Appending zero bytes is linear over GF(2): a 32x32 bit matrix, kept as its columns.
using Matrix = std::array<std::uint32_t, 32>;

constexpr std::uint32_t apply(const Matrix& matrix, std::uint32_t vector) {
    std::uint32_t sum = 0;
    for (std::size_t i = 0; vector != 0; ++i, vector >>= 1)
        if (vector & 1) sum ^= matrix[i];
    return sum;
}

constexpr Matrix append_zeros(std::size_t nbytes) {
    Matrix matrix{};
    for (std::size_t i = 0; i < 32; ++i) {
        const std::uint32_t crc = std::uint32_t{1} << i;
        matrix[i] = (crc >> 8) ^ kSlices[0][crc & 0xFF];
    }
    for (; nbytes > 1; nbytes /= 2) {
        const Matrix half = matrix;
        for (std::size_t i = 0; i < 32; ++i) matrix[i] = apply(half, half[i]);
    }
    return matrix;
}

// The same map by table, a lookup for each byte of the checksum.
struct Shift {
    std::array<Table, 4> tables{};

    constexpr explicit Shift(std::size_t nbytes) {
        const Matrix matrix = append_zeros(nbytes);
        for (std::size_t k = 0; k < 4; ++k)
            for (std::uint32_t value = 1; value < 256; ++value) {
                const auto lowest = static_cast<std::size_t>(std::countr_zero(value));
                tables[k][value] = tables[k][value & (value - 1)] ^ matrix[8 * k + lowest];
            }
    }

    std::uint32_t operator()(std::uint32_t crc) const noexcept {
        return tables[0][crc & 0xFF] ^ tables[1][(crc >> 8) & 0xFF] ^
               tables[2][(crc >> 16) & 0xFF] ^ tables[3][crc >> 24];
    }
};

// The instruction takes three cycles and one can start each cycle: three streams keep it busy.
// Long stretches make the joins rare; short ones serve small buffers. Powers of two, as
// append_zeros needs.
constexpr std::size_t kLong = 8192;
constexpr std::size_t kShort = 256;
constexpr Shift kShiftLong{kLong};
constexpr Shift kShiftShort{kShort};

#if defined(__x86_64__)
SLIPSTREAM_CRC_TARGET inline std::uint64_t step8(std::uint64_t crc, std::uint64_t word) {
    return _mm_crc32_u64(crc, word);
}
SLIPSTREAM_CRC_TARGET inline std::uint64_t step1(std::uint64_t crc, std::byte byte) {
    return _mm_crc32_u8(static_cast<std::uint32_t>(crc), std::to_integer<std::uint8_t>(byte));
}
bool has_instruction() noexcept { return __builtin_cpu_supports("sse4.2"); }
#else
SLIPSTREAM_CRC_TARGET inline std::uint64_t step8(std::uint64_t crc, std::uint64_t word) {
    return __crc32cd(static_cast<std::uint32_t>(crc), word);
}
SLIPSTREAM_CRC_TARGET inline std::uint64_t step1(std::uint64_t crc, std::byte byte) {
    return __crc32cb(static_cast<std::uint32_t>(crc), std::to_integer<std::uint8_t>(byte));
}
bool has_instruction() noexcept {
#if defined(__ARM_FEATURE_CRC32)
    return true;
#else
    return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0;
#endif
}
#endif

// Consumes as many triples of `stretch` bytes as there are.
SLIPSTREAM_CRC_TARGET std::uint64_t run_triples(std::uint64_t crc, const std::byte*& data,
                                                std::size_t& nbytes, std::size_t stretch,
                                                const Shift& shift) noexcept {
    for (; nbytes >= 3 * stretch; nbytes -= 3 * stretch) {
        std::uint64_t second = 0;
        std::uint64_t third = 0;
        for (const std::byte* end = data + stretch; data < end; data += 8) {
            crc = step8(crc, load_little_endian(data));
            second = step8(second, load_little_endian(data + stretch));
            third = step8(third, load_little_endian(data + 2 * stretch));
        }
        crc = shift(static_cast<std::uint32_t>(crc)) ^ second;
        crc = shift(static_cast<std::uint32_t>(crc)) ^ third;
        data += 2 * stretch;
    }
    return crc;
}

SLIPSTREAM_CRC_TARGET std::uint32_t crc32c_instruction(const std::byte* data, std::size_t nbytes,
                                                       std::uint32_t seed) noexcept {
    std::uint64_t crc = ~seed;
    crc = run_triples(crc, data, nbytes, kLong, kShiftLong);
    crc = run_triples(crc, data, nbytes, kShort, kShiftShort);
    for (; nbytes >= 8; data += 8, nbytes -= 8) crc = step8(crc, load_little_endian(data));
    for (; nbytes > 0; ++data, --nbytes) crc = step1(crc, *data);
    return ~static_cast<std::uint32_t>(crc);
}

#endif  // SLIPSTREAM_CRC_TARGET

}  // namespace

std::uint32_t crc32c_portable(const std::byte* data, std::size_t nbytes,
                              std::uint32_t seed) noexcept {
    std::uint32_t crc = ~seed;
    for (; nbytes >= 8; data += 8, nbytes -= 8) {
        const std::uint64_t word = load_little_endian(data) ^ crc;
        crc = 0;
        for (int i = 0; i < 8; ++i)
            crc ^= kSlices[static_cast<std::size_t>(7 - i)][(word >> (8 * i)) & 0xFF];
    }
    for (; nbytes > 0; ++data, --nbytes)
        crc = (crc >> 8) ^ kSlices[0][(crc ^ std::to_integer<std::uint32_t>(*data)) & 0xFF];
    return ~crc;
}

std::uint32_t crc32c(const std::byte* data, std::size_t nbytes, std::uint32_t seed) noexcept {
#if defined(SLIPSTREAM_CRC_TARGET)
    static const bool accelerated = has_instruction();
    if (accelerated) return crc32c_instruction(data, nbytes, seed);
#endif
    return crc32c_portable(data, nbytes, seed);
}

}  // namespace slipstream
