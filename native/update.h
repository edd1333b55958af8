#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace slipstream {

// Optimizers' updates of weights in place, from the gradients in a slot.
//
// A slot begins with one word for each tensor, its form: kAbsent, kDense, or kRows + the number of
// rows that are not zero; then kSettings doubles for each parameter group, its optimizer's settings.
// The complete tensors follow, each at its own offset, and the numbers of rows. A row may be listed
// twice: it counts once, since rows are set to zero when they are applied.

constexpr std::uint64_t kAbsent = 0, kDense = 1, kRows = 2;
constexpr std::size_t kSettings = 8;

// Adds rows of values to the rows of `out` that `ids` lists, and records their numbers. Returns false,
// and changes nothing, if `out` has no such row.
template <typename T>
bool add_rows(T* out, std::int64_t* numbers, std::size_t all, std::size_t width,
              const std::int64_t* ids, const T* values, std::size_t rows) noexcept;

enum class Rule {
    sgd,      // lr, momentum, dampening, weight decay, nesterov, maximize
    adam,     // lr, beta1, beta2, epsilon, weight decay, decoupled, maximize
    rmsprop,  // lr, alpha, epsilon, weight decay, momentum, centered, maximize
    adagrad,  // lr, lr decay, epsilon, weight decay, initial sum, maximize
};

struct Place {
    std::size_t weights_at;  // bytes from the beginning of the weights, and of an optimizer's state
    std::size_t slot_at;     // bytes from the beginning of a slot
    std::size_t numbers_at;  // of the rows' numbers in a slot, as int64
    std::size_t count;       // values
    std::size_t width;       // values of a row; 0 if it is never sent as rows
    std::size_t group;
    bool is_double;
};

class Update {
  public:
    Update(Rule rule, std::vector<Place> places, std::size_t groups);

    std::size_t weights_nbytes() const noexcept { return weights_nbytes_; }
    std::size_t slot_nbytes() const noexcept { return slot_nbytes_; }
    std::size_t tensors() const noexcept { return places_.size(); }

    // The optimizer's state, each part as large as the weights, and its steps by tensor; zeros at first.
    // `third` is used by centered RMSprop only.
    struct Memory {
        std::byte *first, *second, *third;
        std::uint64_t* steps;
    };

    // Returns why the slot cannot be applied, without any change; nullptr if it was applied. The rows of
    // a slot are all zeros afterwards.
    const char* apply(std::byte* weights, std::byte* slot, const Memory& memory);

  private:
    const char* take_and_check(const std::byte* slot);
    template <typename T>
    void one(const Place& place, std::byte* weights, std::byte* slot, std::size_t tensor,
             const double* settings, const Memory& memory, std::uint64_t& steps);

    Rule rule_;
    std::vector<Place> places_;
    std::size_t groups_, weights_nbytes_ = 0, slot_nbytes_ = 0;
    // A copy of the slot being applied, since the learner that filled it could still write there.
    std::vector<std::uint64_t> forms_;
    std::vector<std::vector<std::int64_t>> numbers_;
};

}  // namespace slipstream
