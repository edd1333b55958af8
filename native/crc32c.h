#pragma once

#include <cstddef>
#include <cstdint>

namespace slipstream {

// CRC-32C (Castagnoli, reflected polynomial 0x82F63B78). A call continues the checksum `seed`,
// so crc32c(b, crc32c(a)) is the checksum of a followed by b. Both functions agree on all input.
std::uint32_t crc32c(const std::byte* data, std::size_t nbytes, std::uint32_t seed) noexcept;
std::uint32_t crc32c_portable(const std::byte* data, std::size_t nbytes,
                              std::uint32_t seed) noexcept;

}  // namespace slipstream
