#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "text_net.h"

namespace slipstream {

// All rows of training data, one after the other: row i has the words from word_ends[i - 1] to
// word_ends[i]; features and classes are stored in the same way.
struct TextRows {
    const std::int64_t* words;
    const std::int64_t* word_ends;
    const std::int64_t* features;
    const float* values;
    const std::int64_t* feature_ends;
    const std::int64_t* classes;
    const std::int64_t* class_ends;
};

// The random drops of training.
struct TextDropout {
    const float* words;    // for each word, the probability to become `unknown`
    std::int64_t unknown;  // a word's number
    float features;        // the probability to leave out a feature
    float maps;            // the probability to set a pooled value to 0
};

// The memory for the parts of a batch; that of features has room for all features of its rows.
struct TextBatchParts {
    std::int64_t* words;
    std::int64_t* word_ends;
    std::int64_t* features;
    float* values;
    std::int64_t* feature_ends;
    float* targets;  // a row of `classes` a text
    float* kept;     // a row of `pooled` for each text
};

// Writes some rows as a batch, and returns how many features it has. `noise` is the state of the
// random generator, which advances; without it nothing is dropped.
std::size_t text_batch(const TextRows& rows, std::span<const std::int64_t> numbers,
                       const TextDropout& dropout, std::size_t classes, std::size_t pooled,
                       std::uint64_t* noise, const TextBatchParts& out);

}  // namespace slipstream
