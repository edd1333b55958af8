#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace slipstream {

// One size of window: `weight` has a row of width x dimensions floats for each map.
struct TextWindow {
    std::size_t width;
    const float* weight;
    const float* bias;
    float* weight_gradient;
    float* bias_gradient;
};

// The weights of a wide and deep net, and the memory for its dense gradients.
struct TextNet {
    std::size_t dimensions;
    std::size_t maps;
    std::size_t classes;
    std::span<const TextWindow> windows;
    const float* embedding;   // a row of `dimensions` for each word
    const float* classifier;  // a row of windows x maps for each class
    const float* classifier_bias;
    const float* wide;  // a row of `classes` for each feature
    float* classifier_gradient;
    float* classifier_bias_gradient;
};

// Some texts, one after the other: text i has the words from word_ends[i - 1] to word_ends[i], at
// least as many as the widest window, and the features from feature_ends[i - 1] to feature_ends[i].
struct TextBatch {
    std::size_t texts;
    const std::int64_t* words;  // 0 is padding: its vector gets no gradient
    const std::int64_t* word_ends;
    const std::int64_t* features;
    const float* values;
    const std::int64_t* feature_ends;
    const float* targets;  // shares of the classes, a row for each text, which adds up to 1
    const float* kept;     // dropout: the factor of each pooled value, a row for each text
};

// The results of one pass besides dense gradients; every value is written.
struct TextResults {
    float* word_gradients;     // a row of `dimensions` for each word of the batch
    float* feature_gradients;  // a row of `classes` for each feature of the batch
    float* deep;               // scores, a row of `classes` for each text
    float* wide;
};

// The mean loss of a batch, and the gradient of every weight, in one pass. The loss of a text is
// cross-entropy(deep, targets) + sum over classes of max(0, 1 - y wide)^2 with y = 1 where the
// target is above 0, else -1. Of equal maxima over time the first gets the gradient.
//
// Other processes may change the weights meanwhile (gadei's update server does): the classifier and
// the windows are read twice, so a gradient may mix the values before and after an update.
//
// Most of the time of an ordinary backward pass goes into products with zeros: of each map, only
// the window with the largest value has a gradient, and dropout removes half of those.
double text_net_gradients(const TextNet& net, const TextBatch& batch, const TextResults& results);

}  // namespace slipstream
