#include "update.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace slipstream {

namespace {

template <typename T>
void plain(T* __restrict w, const T* __restrict g, std::size_t count, T rate) {
    for (std::size_t i = 0; i < count; ++i) w[i] -= rate * g[i];
}

template <typename T>
void sgd(T* __restrict w, const T* __restrict g, T* __restrict m, std::size_t count,
         const double* s, std::uint64_t step) {
    const double sign = s[5] != 0.0 ? -1.0 : 1.0;
    if (s[1] == 0.0 && s[3] == 0.0) return plain(w, g, count, static_cast<T>(sign * s[0]));
    const auto rate = static_cast<T>(s[0]), decay = static_cast<T>(s[3]);
    const auto up = static_cast<T>(sign), momentum = static_cast<T>(s[1]);
    if (s[1] == 0.0) {
        for (std::size_t i = 0; i < count; ++i) w[i] -= rate * (up * g[i] + decay * w[i]);
        return;
    }
    const auto kept = step == 1 ? T{0} : momentum;
    const auto fresh = step == 1 ? T{1} : static_cast<T>(1.0 - s[2]);
    if (s[4] != 0.0) {
        for (std::size_t i = 0; i < count; ++i) {
            const T slope = up * g[i] + decay * w[i];
            m[i] = kept * m[i] + fresh * slope;
            w[i] -= rate * (slope + momentum * m[i]);
        }
        return;
    }
    for (std::size_t i = 0; i < count; ++i) {
        m[i] = kept * m[i] + fresh * (up * g[i] + decay * w[i]);
        w[i] -= rate * m[i];
    }
}

template <typename T>
void adam(T* __restrict w, const T* __restrict g, T* __restrict m, T* __restrict v,
          std::size_t count, const double* s, std::uint64_t step) {
    const auto up = static_cast<T>(s[6] != 0.0 ? -1.0 : 1.0);
    const auto steps = static_cast<double>(step);
    const auto rate = static_cast<T>(s[0] / (1.0 - std::pow(s[1], steps)));
    const auto scale = static_cast<T>(1.0 / std::sqrt(1.0 - std::pow(s[2], steps)));
    const auto beta1 = static_cast<T>(s[1]), fresh1 = static_cast<T>(1.0 - s[1]);
    const auto beta2 = static_cast<T>(s[2]), fresh2 = static_cast<T>(1.0 - s[2]);
    const auto epsilon = static_cast<T>(s[3]);
    const bool decoupled = s[5] != 0.0;
    const auto decay = static_cast<T>(decoupled ? 0.0 : s[4]);
    const auto keeps = static_cast<T>(decoupled ? 1.0 - s[0] * s[4] : 1.0);
    for (std::size_t i = 0; i < count; ++i) {
        const T slope = up * g[i] + decay * w[i];
        m[i] = beta1 * m[i] + fresh1 * slope;
        v[i] = beta2 * v[i] + fresh2 * slope * slope;
        w[i] = keeps * w[i] - rate * (m[i] / (std::sqrt(v[i]) * scale + epsilon));
    }
}

template <typename T>
void rmsprop(T* __restrict w, const T* __restrict g, T* __restrict v, T* __restrict m,
             T* __restrict a, std::size_t count, const double* s) {
    const auto up = static_cast<T>(s[6] != 0.0 ? -1.0 : 1.0);
    const auto rate = static_cast<T>(s[0]), epsilon = static_cast<T>(s[2]);
    const auto alpha = static_cast<T>(s[1]), fresh = static_cast<T>(1.0 - s[1]);
    const auto decay = static_cast<T>(s[3]), momentum = static_cast<T>(s[4]);
    const bool centered = s[5] != 0.0, remembers = s[4] > 0.0;
    for (std::size_t i = 0; i < count; ++i) {
        const T slope = up * g[i] + decay * w[i];
        v[i] = alpha * v[i] + fresh * slope * slope;
        T spread = v[i];
        if (centered) {
            a[i] = alpha * a[i] + fresh * slope;
            spread -= a[i] * a[i];
        }
        const T change = slope / (std::sqrt(spread) + epsilon);
        if (remembers) m[i] = momentum * m[i] + change;
        w[i] -= rate * (remembers ? m[i] : change);
    }
}

template <typename T>
void adagrad(T* __restrict w, const T* __restrict g, T* __restrict sum, std::size_t count,
             const double* s, std::uint64_t step) {
    const auto up = static_cast<T>(s[5] != 0.0 ? -1.0 : 1.0);
    const auto rate = static_cast<T>(s[0] / (1.0 + static_cast<double>(step - 1) * s[1]));
    const auto epsilon = static_cast<T>(s[2]), decay = static_cast<T>(s[3]);
    for (std::size_t i = 0; i < count; ++i) {
        const T slope = up * g[i] + decay * w[i];
        sum[i] += slope * slope;
        w[i] -= rate * (slope / (std::sqrt(sum[i]) + epsilon));
    }
}

template <typename T>
const T* as(const std::byte* bytes) {
    return reinterpret_cast<const T*>(bytes);
}

template <typename T>
T* as(std::byte* bytes) {
    return reinterpret_cast<T*>(bytes);
}

}  // namespace

template <typename T>
bool add_rows(T* out, std::int64_t* numbers, std::size_t all, std::size_t width,
              const std::int64_t* ids, const T* values, std::size_t rows) noexcept {
    for (std::size_t r = 0; r < rows; ++r)
        if (ids[r] < 0 || static_cast<std::size_t>(ids[r]) >= all) return false;
    for (std::size_t r = 0; r < rows; ++r) {
        numbers[r] = ids[r];
        T* __restrict to = out + static_cast<std::size_t>(ids[r]) * width;
        const T* __restrict from = values + r * width;
        for (std::size_t i = 0; i < width; ++i) to[i] += from[i];
    }
    return true;
}

template bool add_rows(float*, std::int64_t*, std::size_t, std::size_t, const std::int64_t*,
                       const float*, std::size_t) noexcept;
template bool add_rows(double*, std::int64_t*, std::size_t, std::size_t, const std::int64_t*,
                       const double*, std::size_t) noexcept;

Update::Update(Rule rule, std::vector<Place> places, std::size_t groups)
    : rule_(rule),
      places_(std::move(places)),
      groups_(groups),
      forms_(places_.size()),
      numbers_(places_.size()) {
    const std::size_t front =
        places_.size() * sizeof(std::uint64_t) + groups_ * kSettings * sizeof(double);
    slot_nbytes_ = front;
    for (const Place& place : places_) {
        const std::size_t size = place.is_double ? sizeof(double) : sizeof(float);
        weights_nbytes_ = std::max(weights_nbytes_, place.weights_at + place.count * size);
        slot_nbytes_ = std::max(slot_nbytes_, place.slot_at + place.count * size);
        if (place.width == 0) continue;
        const std::size_t rows = place.count / place.width;
        slot_nbytes_ = std::max(slot_nbytes_, place.numbers_at + rows * sizeof(std::int64_t));
    }
}

const char* Update::take_and_check(const std::byte* slot) {
    std::copy_n(as<std::uint64_t>(slot), places_.size(), forms_.begin());
    for (std::size_t i = 0; i < places_.size(); ++i) {
        const Place& place = places_[i];
        numbers_[i].clear();
        if (forms_[i] <= kDense) continue;
        if (place.width == 0) return "a tensor came in rows that has none";
        const std::uint64_t rows = forms_[i] - kRows, all = place.count / place.width;
        if (rows > all) return "a tensor came in more rows than it has";
        const auto* numbers = as<std::int64_t>(slot + place.numbers_at);
        numbers_[i].assign(numbers, numbers + rows);
        for (const std::int64_t number : numbers_[i])
            if (number < 0 || static_cast<std::uint64_t>(number) >= all)
                return "a tensor came with a row that it does not have";
    }
    return nullptr;
}

template <typename T>
void Update::one(const Place& place, std::byte* weights, std::byte* slot, std::size_t tensor,
                 const double* settings, const Memory& memory, std::uint64_t& steps) {
    T* w = as<T>(weights + place.weights_at);
    T* g = as<T>(slot + place.slot_at);
    const auto row_at = [&](std::int64_t number) {
        return static_cast<std::size_t>(number) * place.width;
    };
    const auto clear = [&](std::int64_t number) {
        std::fill_n(g + row_at(number), place.width, T{0});
    };
    ++steps;
    if (forms_[tensor] >= kRows && rule_ == Rule::sgd && settings[1] == 0.0 && settings[3] == 0.0) {
        // For other rows the gradient is zero, and so is the result of this rule.
        const auto rate = static_cast<T>(settings[5] != 0.0 ? -settings[0] : settings[0]);
        for (const std::int64_t number : numbers_[tensor]) {
            plain(w + row_at(number), g + row_at(number), place.width, rate);
            clear(number);
        }
        return;
    }
    T* first = as<T>(memory.first + place.weights_at);
    if (forms_[tensor] >= kRows && rule_ == Rule::adagrad && settings[3] == 0.0) {
        for (const std::int64_t number : numbers_[tensor]) {
            const std::size_t at = row_at(number);
            adagrad(w + at, g + at, first + at, place.width, settings, steps);
            clear(number);
        }
        return;
    }
    T* second = as<T>(memory.second + place.weights_at);
    T* third = as<T>(memory.third + place.weights_at);
    switch (rule_) {
        case Rule::sgd: sgd(w, g, first, place.count, settings, steps); break;
        case Rule::adam: adam(w, g, first, second, place.count, settings, steps); break;
        case Rule::adagrad: adagrad(w, g, first, place.count, settings, steps); break;
        case Rule::rmsprop: rmsprop(w, g, first, second, third, place.count, settings); break;
    }
    for (const std::int64_t number : numbers_[tensor]) clear(number);
}

const char* Update::apply(std::byte* weights, std::byte* slot, const Memory& memory) {
    if (const char* reason = take_and_check(slot)) return reason;
    const auto* settings = as<double>(slot + places_.size() * sizeof(std::uint64_t));
    for (std::size_t i = 0; i < places_.size(); ++i) {
        if (forms_[i] == kAbsent) continue;
        const Place& place = places_[i];
        const double* own = settings + place.group * kSettings;
        const auto run = place.is_double ? &Update::one<double> : &Update::one<float>;
        (this->*run)(place, weights, slot, i, own, memory, memory.steps[i]);
    }
    return nullptr;
}

}  // namespace slipstream
