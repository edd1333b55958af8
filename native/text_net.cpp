#include "text_net.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "clones.h"

namespace slipstream {
namespace {

// If std::max has a NaN as its first argument, it returns it: a NaN in a weight reaches the loss.

constexpr std::size_t kLanes = 16;  // of sums of products

// Sums of products of `Rows` rows of weights with `Places` windows, `stride` floats apart.
template <std::size_t Rows, std::size_t Places>
SLIPSTREAM_INLINE void dot(float (&out)[Rows][Places], const float* __restrict weight,
                           const float* __restrict x, std::size_t stride, std::size_t count) {
    typedef float Vector __attribute__((vector_size(kLanes * sizeof(float))));
    Vector lanes[Rows][Places] = {};
    std::size_t j = 0;
    for (; j + kLanes <= count; j += kLanes) {
        Vector right[Places];
        for (std::size_t p = 0; p < Places; ++p)
            std::memcpy(&right[p], x + p * stride + j, sizeof(Vector));
        for (std::size_t m = 0; m < Rows; ++m) {
            Vector left;
            std::memcpy(&left, weight + m * count + j, sizeof left);
            for (std::size_t p = 0; p < Places; ++p) lanes[m][p] += left * right[p];
        }
    }
    for (std::size_t m = 0; m < Rows; ++m)
        for (std::size_t p = 0; p < Places; ++p) {
            float sum = 0;
            for (std::size_t l = 0; l < kLanes; ++l) sum += lanes[m][p][l];
            for (std::size_t k = j; k < count; ++k) sum += weight[m * count + k] * x[p * stride + k];
            out[m][p] = sum;
        }
}

SLIPSTREAM_INLINE void add_scaled(float* __restrict to, float scale, const float* __restrict from,
                                  std::size_t count) {
    for (std::size_t j = 0; j < count; ++j) to[j] += scale * from[j];
}

SLIPSTREAM_INLINE void write_scaled(float* __restrict to, float scale,
                                    const float* __restrict from, std::size_t count) {
    for (std::size_t j = 0; j < count; ++j) to[j] = scale * from[j];
}

// Finds the largest value of each map over all windows, and the index of its window.
template <std::size_t Rows>
SLIPSTREAM_INLINE void pool(float* best, std::size_t* where, const TextWindow& window,
                            std::size_t map, const float* x, std::size_t dimensions,
                            std::size_t places) {
    const std::size_t count = window.width * dimensions;
    const float* weight = window.weight + map * count;
    const auto take = [&](std::size_t m, std::size_t place, float value) {
        if (place == 0 || value > best[map + m] || value != value) {  // NaN stays
            best[map + m] = value;
            where[map + m] = place;
        }
    };
    std::size_t place = 0;
    for (; place + 4 <= places; place += 4) {
        float out[Rows][4];
        dot<Rows, 4>(out, weight, x + place * dimensions, dimensions, count);
        for (std::size_t m = 0; m < Rows; ++m)
            for (std::size_t p = 0; p < 4; ++p) take(m, place + p, out[m][p]);
    }
    for (; place < places; ++place) {
        float out[Rows][1];
        dot<Rows, 1>(out, weight, x + place * dimensions, dimensions, count);
        for (std::size_t m = 0; m < Rows; ++m) take(m, place, out[m][0]);
    }
    for (std::size_t m = 0; m < Rows; ++m) best[map + m] += window.bias[map + m];
}

// Computes cross-entropy with soft targets; `gradient` gets its derivative, times `scale`.
double cross_entropy(float* gradient, const float* scores, const float* targets,
                     std::size_t classes, float scale) {
    const float highest = *std::max_element(scores, scores + classes);
    double total = 0;
    for (std::size_t c = 0; c < classes; ++c) total += gradient[c] = std::exp(scores[c] - highest);
    const double log_total = std::log(total) + highest;
    double loss = 0;
    for (std::size_t c = 0; c < classes; ++c) {
        if (targets[c] > 0) loss += targets[c] * (log_total - scores[c]);
        gradient[c] = scale * (gradient[c] / static_cast<float>(total) - targets[c]);
    }
    return loss;
}

double squared_hinge(float* gradient, const float* scores, const float* targets,
                     std::size_t classes, float scale) {
    double loss = 0;
    for (std::size_t c = 0; c < classes; ++c) {
        const float sign = targets[c] > 0 ? 1.0f : -1.0f;
        const float missing = std::max(1.0f - sign * scores[c], 0.0f);
        loss += static_cast<double>(missing) * missing;
        gradient[c] = -2 * scale * sign * missing;
    }
    return loss;
}

// The intermediate values of one text; one object serves all texts of a batch.
struct Scratch {
    std::vector<float> x, pooled, best, slope, gradient;
    std::vector<std::size_t> where;
};

// Writes scores, then the loss's gradient of everything after the pooled values; texts with `first`
// overwrite, others add.
SLIPSTREAM_CLONES
double above_the_pool(const TextNet& net, const float* targets, const float* kept, float* deep,
                      Scratch& own, bool first, float scale) {
    const std::size_t width = net.windows.size() * net.maps;
    for (std::size_t i = 0; i < width; ++i) own.pooled[i] = std::max(own.best[i], 0.0f) * kept[i];
    for (std::size_t c = 0; c < net.classes; ++c) {
        float out[1][1];
        dot<1, 1>(out, net.classifier + c * width, own.pooled.data(), 0, width);
        deep[c] = out[0][0] + net.classifier_bias[c];
    }
    const double loss = cross_entropy(own.slope.data(), deep, targets, net.classes, scale);
    std::fill_n(own.gradient.begin(), width, 0.0f);
    for (std::size_t c = 0; c < net.classes; ++c) {
        const float slope = own.slope[c];
        add_scaled(own.gradient.data(), slope, net.classifier + c * width, width);
        float* row = net.classifier_gradient + c * width;
        if (first)
            write_scaled(row, slope, own.pooled.data(), width);
        else
            add_scaled(row, slope, own.pooled.data(), width);
        net.classifier_bias_gradient[c] = (first ? 0.0f : net.classifier_bias_gradient[c]) + slope;
    }
    for (std::size_t i = 0; i < width; ++i)
        own.gradient[i] = own.best[i] <= 0 ? 0.0f : own.gradient[i] * kept[i];
    return loss;
}

SLIPSTREAM_CLONES
void below_the_pool(const TextNet& net, float* word_gradients, std::size_t length,
                    const Scratch& own, bool first) {
    std::fill_n(word_gradients, length * net.dimensions, 0.0f);
    for (std::size_t w = 0; w < net.windows.size(); ++w) {
        const TextWindow& window = net.windows[w];
        const std::size_t count = window.width * net.dimensions;
        for (std::size_t map = 0; map < net.maps; ++map) {
            const float slope = own.gradient[w * net.maps + map];
            const std::size_t at = own.where[w * net.maps + map] * net.dimensions;
            float* row = window.weight_gradient + map * count;
            if (first)
                write_scaled(row, slope, own.x.data() + at, count);
            else if (slope != 0)
                add_scaled(row, slope, own.x.data() + at, count);
            window.bias_gradient[map] = (first ? 0.0f : window.bias_gradient[map]) + slope;
            if (slope != 0)
                add_scaled(word_gradients + at, slope, window.weight + map * count, count);
        }
    }
}

SLIPSTREAM_CLONES
void pool_all(const TextNet& net, std::size_t length, Scratch& own) {
    for (std::size_t w = 0; w < net.windows.size(); ++w) {
        const TextWindow& window = net.windows[w];
        float* best = own.best.data() + w * net.maps;
        std::size_t* where = own.where.data() + w * net.maps;
        const std::size_t places = length - window.width + 1;
        std::size_t map = 0;
        for (; map + 2 <= net.maps; map += 2)
            pool<2>(best, where, window, map, own.x.data(), net.dimensions, places);
        for (; map < net.maps; ++map)
            pool<1>(best, where, window, map, own.x.data(), net.dimensions, places);
    }
}

SLIPSTREAM_CLONES
double wide_part(const TextNet& net, const std::int64_t* features, const float* values,
                 std::size_t count, const float* targets, float* wide, float* gradients,
                 Scratch& own, float scale) {
    std::fill_n(wide, net.classes, 0.0f);
    for (std::size_t i = 0; i < count; ++i)
        add_scaled(wide, values[i], net.wide + features[i] * net.classes, net.classes);
    const double loss = squared_hinge(own.slope.data(), wide, targets, net.classes, scale);
    for (std::size_t i = 0; i < count; ++i)
        write_scaled(gradients + i * net.classes, values[i], own.slope.data(), net.classes);
    return loss;
}

}  // namespace

double text_net_gradients(const TextNet& net, const TextBatch& batch, const TextResults& results) {
    const std::size_t width = net.windows.size() * net.maps;
    Scratch own{{},
                std::vector<float>(width),
                std::vector<float>(width),
                std::vector<float>(net.classes),
                std::vector<float>(width),
                std::vector<std::size_t>(width)};
    const float scale = 1.0f / static_cast<float>(batch.texts);
    double loss = 0;
    std::size_t word = 0, feature = 0;
    for (std::size_t text = 0; text < batch.texts; ++text) {
        const std::size_t length = batch.word_ends[text] - word;
        const float* targets = batch.targets + text * net.classes;
        own.x.resize(length * net.dimensions);
        for (std::size_t i = 0; i < length; ++i)
            std::memcpy(own.x.data() + i * net.dimensions,
                        net.embedding + batch.words[word + i] * net.dimensions,
                        net.dimensions * sizeof(float));
        pool_all(net, length, own);
        loss += above_the_pool(net, targets, batch.kept + text * width,
                               results.deep + text * net.classes, own, text == 0, scale);
        float* word_gradients = results.word_gradients + word * net.dimensions;
        below_the_pool(net, word_gradients, length, own, text == 0);
        for (std::size_t i = 0; i < length; ++i)
            if (batch.words[word + i] == 0)
                std::fill_n(word_gradients + i * net.dimensions, net.dimensions, 0.0f);
        const std::size_t count = batch.feature_ends[text] - feature;
        loss += wide_part(net, batch.features + feature, batch.values + feature, count, targets,
                          results.wide + text * net.classes,
                          results.feature_gradients + feature * net.classes, own, scale);
        word += length;
        feature += count;
    }
    return loss * scale;
}

}  // namespace slipstream
