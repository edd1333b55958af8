#include "text_batch.h"

#include <algorithm>

namespace slipstream {

namespace {

// splitmix64: its period is 2^64 whatever state it begins with.
class Noise {
  public:
    explicit Noise(std::uint64_t state) : state_(state) {}

    std::uint64_t state() const { return state_; }

    // True with this probability, in steps of 2^-24.
    bool chance(float probability) {
        std::uint64_t mixed = state_ += 0x9E3779B97F4A7C15;
        mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9;
        mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB;
        mixed ^= mixed >> 31;
        return static_cast<float>(mixed >> 40) * 0x1p-24f < probability;
    }

  private:
    std::uint64_t state_;
};

struct Range {
    std::int64_t begin, end;
};

Range range_of(const std::int64_t* ends, std::int64_t row) {
    return {row == 0 ? 0 : ends[row - 1], ends[row]};
}

}  // namespace

std::size_t text_batch(const TextRows& rows, std::span<const std::int64_t> numbers,
                       const TextDropout& dropout, std::size_t classes, std::size_t pooled,
                       std::uint64_t* noise, const TextBatchParts& out) {
    Noise random(noise ? *noise : 0);
    // Values that stay also count for those that are dropped, so that sums have the same mean.
    const float scale = noise ? 1 / (1 - dropout.features) : 1.0f;
    const float kept = noise ? 1 / (1 - dropout.maps) : 1.0f;
    std::int64_t words = 0, features = 0;
    std::fill_n(out.targets, numbers.size() * classes, 0.0f);
    for (std::size_t text = 0; text < numbers.size(); ++text) {
        const Range own = range_of(rows.word_ends, numbers[text]);
        for (std::int64_t i = own.begin; i < own.end; ++i) {
            const std::int64_t word = rows.words[i];
            out.words[words++] = noise && random.chance(dropout.words[word]) ? dropout.unknown : word;
        }
        out.word_ends[text] = words;
        const Range known = range_of(rows.feature_ends, numbers[text]);
        for (std::int64_t i = known.begin; i < known.end; ++i) {
            if (noise && random.chance(dropout.features)) continue;
            out.features[features] = rows.features[i];
            out.values[features++] = rows.values[i] * scale;
        }
        out.feature_ends[text] = features;
        const Range right = range_of(rows.class_ends, numbers[text]);
        for (std::int64_t i = right.begin; i < right.end; ++i)
            out.targets[text * classes + rows.classes[i]] =
                1.0f / static_cast<float>(right.end - right.begin);
    }
    for (std::size_t i = 0; i < numbers.size() * pooled; ++i)
        out.kept[i] = noise && random.chance(dropout.maps) ? 0.0f : kept;
    if (noise) *noise = random.state();
    return static_cast<std::size_t>(features);
}

}  // namespace slipstream
