// The Python interface of the text net: sizes and numbers are checked here, so the kernel need not.

#include "text_module.h"

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <deque>
#include <initializer_list>
#include <tuple>
#include <vector>

#include "buffers.h"
#include "text_batch.h"
#include "text_net.h"

namespace slipstream {

namespace nb = nanobind;
using namespace nb::literals;

namespace {

// The buffers of one argument, whose sizes are checked as they are taken one after the other.
class Buffers {
  public:
    Buffers(nb::handle objects, std::string name, Buffer::Access access)
        : name_(std::move(name)) {
        for (nb::handle object : objects)
            held_.emplace_back(object, name_ + "[" + std::to_string(held_.size()) + "]", access);
    }

    std::size_t size() const { return held_.size(); }

    template <typename T>
    std::size_t count(std::size_t index) const {
        const std::size_t nbytes = held_.at(index).nbytes();
        if (nbytes % sizeof(T) != 0) wrong(index, nbytes, "a whole number of values");
        if (reinterpret_cast<std::uintptr_t>(held_[index].data()) % alignof(T) != 0)
            refuse(label(index) + " is not aligned to its values");
        return nbytes / sizeof(T);
    }

    template <typename T>
    T* take(std::size_t index, std::size_t expected) const {
        if (count<T>(index) != expected)
            wrong(index, held_[index].nbytes(), std::to_string(expected) + " values");
        return reinterpret_cast<T*>(held_[index].data());
    }

    // The output must not overlap anything else.
    void refuse_overlap(std::initializer_list<const Buffers*> others) const {
        for (std::size_t i = 0; i < size(); ++i) {
            for (std::size_t j = i + 1; j < size(); ++j) refuse_pair(i, *this, j);
            for (const Buffers* other : others)
                for (std::size_t j = 0; j < other->size(); ++j) refuse_pair(i, *other, j);
        }
    }

  private:
    void refuse_pair(std::size_t index, const Buffers& other, std::size_t at) const {
        if (overlap(held_[index], other.held_[at]))
            refuse(label(index) + " overlaps " + other.label(at));
    }

    std::string label(std::size_t index) const {
        return name_ + "[" + std::to_string(index) + "]";
    }

    [[noreturn]] void wrong(std::size_t index, std::size_t nbytes, const std::string& expected) const {
        refuse(label(index) + " has " + std::to_string(nbytes) + " bytes, which are not " + expected);
    }

    std::string name_;
    std::deque<Buffer> held_;
};

void check_numbers(const std::int64_t* numbers, std::size_t count, std::size_t rows,
                   const char* what) {
    const auto known = [rows](std::int64_t n) {
        return n >= 0 && static_cast<std::uint64_t>(n) < rows;
    };
    const auto* bad = std::find_if_not(numbers, numbers + count, known);
    if (bad != numbers + count)
        refuse(std::string(what) + " " + std::to_string(*bad) + " is not one of the table's " +
               std::to_string(rows));
}

void check_ends(const std::int64_t* ends, std::size_t texts, std::size_t total, std::size_t least,
                const char* what) {
    std::int64_t before = 0;
    for (std::size_t i = 0; i < texts; before = ends[i++])
        if (ends[i] < before)
            refuse("the ends of " + std::string(what) + " fall at text " + std::to_string(i));
        else if (static_cast<std::size_t>(ends[i] - before) < least)
            refuse("text " + std::to_string(i) + " has fewer than " + std::to_string(least) + " " +
                   what);
    if (static_cast<std::size_t>(before) != total)
        refuse("the texts end at " + std::to_string(before) + " of " + std::to_string(total) + " " +
               what);
}

constexpr std::size_t kPlain = 4;  // weights before those of the windows
// The limit of three sizes, and of the windows: no product of three of these overflows.
constexpr std::size_t kMost = std::size_t{1} << 20;
constexpr std::size_t kMostWindows = 64;

double gradients(std::tuple<std::size_t, std::size_t, std::size_t> sizes,
                 const std::vector<std::size_t>& widths, const nb::sequence& weights,
                 const nb::sequence& batch, const nb::sequence& gradients,
                 const nb::sequence& scores) {
    const auto [dimensions, maps, classes] = sizes;
    const Buffers own(weights, "weights", Buffer::Access::read);
    const Buffers in(batch, "batch", Buffer::Access::read);
    const Buffers to(gradients, "gradients", Buffer::Access::write);
    const Buffers out(scores, "scores", Buffer::Access::write);
    const std::size_t parts = kPlain + 2 * widths.size();
    if (own.size() != parts || to.size() != parts || in.size() != 7 || out.size() != 2)
        refuse("there must be " + std::to_string(parts) +
               " weights and gradients, 7 parts of a batch and 2 of scores");
    for (std::size_t size : {dimensions, maps, classes})
        if (size == 0 || size > kMost) refuse("a size is 0 or too large");
    for (std::size_t width : widths)
        if (width == 0 || width > kMost) refuse("a window's width is 0 or too large");
    if (widths.empty() || widths.size() > kMostWindows) refuse("there must be 1 to 64 windows");
    to.refuse_overlap({&own, &in, &out});
    out.refuse_overlap({&own, &in});

    const std::size_t pooled = widths.size() * maps;
    const std::size_t words = in.count<std::int64_t>(0), features = in.count<std::int64_t>(2);
    const std::size_t texts = in.count<std::int64_t>(1);
    if (texts == 0) refuse("the batch has no text");
    const std::size_t rows = own.count<float>(0) / dimensions;
    const std::size_t wide_rows = own.count<float>(1) / classes;
    std::vector<TextWindow> windows;
    for (std::size_t i = 0; i < widths.size(); ++i) {
        const std::size_t at = kPlain + 2 * i, size = maps * widths[i] * dimensions;
        windows.push_back({widths[i], own.take<float>(at, size), own.take<float>(at + 1, maps),
                           to.take<float>(at, size), to.take<float>(at + 1, maps)});
    }
    const TextNet net{dimensions,
                      maps,
                      classes,
                      windows,
                      own.take<float>(0, rows * dimensions),
                      own.take<float>(2, classes * pooled),
                      own.take<float>(3, classes),
                      own.take<float>(1, wide_rows * classes),
                      to.take<float>(2, classes * pooled),
                      to.take<float>(3, classes)};
    const TextBatch some{texts,
                         in.take<std::int64_t>(0, words),
                         in.take<std::int64_t>(1, texts),
                         in.take<std::int64_t>(2, features),
                         in.take<float>(3, features),
                         in.take<std::int64_t>(4, texts),
                         in.take<float>(5, texts * classes),
                         in.take<float>(6, texts * pooled)};
    const TextResults results{to.take<float>(0, words * dimensions),
                              to.take<float>(1, features * classes),
                              out.take<float>(0, texts * classes),
                              out.take<float>(1, texts * classes)};
    check_numbers(some.words, words, rows, "word");
    check_numbers(some.features, features, wide_rows, "feature");
    check_ends(some.word_ends, texts, words, *std::ranges::max_element(widths), "words");
    check_ends(some.feature_ends, texts, features, 0, "features");

    const nb::gil_scoped_release unlocked;
    return text_net_gradients(net, some, results);
}

// The ends of all rows, of which only some are read.
std::size_t check_rows(const std::int64_t* ends, const std::int64_t* numbers, std::size_t texts,
                       std::size_t total, const char* what) {
    std::size_t sum = 0;
    for (std::size_t i = 0; i < texts; ++i) {
        const std::int64_t begin = numbers[i] == 0 ? 0 : ends[numbers[i] - 1];
        const std::int64_t end = ends[numbers[i]];
        if (begin < 0 || end < begin || static_cast<std::size_t>(end) > total)
            refuse("row " + std::to_string(numbers[i]) + " has no range of " + what);
        sum += static_cast<std::size_t>(end - begin);
    }
    return sum;
}

// The values of some rows are indices into a table.
void check_rows_numbers(const std::int64_t* values, const std::int64_t* ends,
                        const std::int64_t* numbers, std::size_t texts, std::size_t table,
                        const char* what) {
    for (std::size_t i = 0; i < texts; ++i) {
        const std::int64_t begin = numbers[i] == 0 ? 0 : ends[numbers[i] - 1];
        check_numbers(values + begin, static_cast<std::size_t>(ends[numbers[i]] - begin), table, what);
    }
}

std::size_t batch(const nb::sequence& rows, const nb::object& numbers, const nb::object& dropped,
                  std::int64_t unknown, std::tuple<float, float> rates, std::size_t classes,
                  const nb::object& noise, const nb::sequence& batch) {
    const Buffers in(rows, "rows", Buffer::Access::read);
    const Buffers chosen(nb::make_tuple(numbers), "numbers", Buffer::Access::read);
    const Buffers table(nb::make_tuple(dropped), "dropped", Buffer::Access::read);
    const Buffers out(batch, "batch", Buffer::Access::write);
    if (in.size() != 7 || out.size() != 7) refuse("there must be 7 parts of rows and of a batch");
    for (float rate : {std::get<0>(rates), std::get<1>(rates)})
        if (!(rate >= 0 && rate < 1)) refuse("a dropout is not from 0 to less than 1");
    if (classes == 0 || classes > kMost) refuse("there are 0 or too many classes");
    out.refuse_overlap({&in, &chosen, &table});

    const std::size_t count = in.count<std::int64_t>(1), texts = chosen.count<std::int64_t>(0);
    const std::size_t words = in.count<std::int64_t>(0), features = in.count<std::int64_t>(2);
    const std::size_t labels = in.count<std::int64_t>(5), known = table.count<float>(0);
    const TextRows all{in.take<std::int64_t>(0, words), in.take<std::int64_t>(1, count),
                       in.take<std::int64_t>(2, features), in.take<float>(3, features),
                       in.take<std::int64_t>(4, count), in.take<std::int64_t>(5, labels),
                       in.take<std::int64_t>(6, count)};
    const std::int64_t* some = chosen.take<std::int64_t>(0, texts);
    check_numbers(some, texts, count, "row");
    const std::size_t own_words = check_rows(all.word_ends, some, texts, words, "words");
    const std::size_t own_features = check_rows(all.feature_ends, some, texts, features, "features");
    check_rows(all.class_ends, some, texts, labels, "classes");
    check_rows_numbers(all.words, all.word_ends, some, texts, known, "word");
    check_numbers(&unknown, 1, known, "unknown word");
    check_rows_numbers(all.classes, all.class_ends, some, texts, classes, "class");
    const std::size_t pooled = texts == 0 ? 0 : out.count<float>(6) / texts;
    const TextBatchParts parts{out.take<std::int64_t>(0, own_words),
                               out.take<std::int64_t>(1, texts),
                               out.take<std::int64_t>(2, own_features),
                               out.take<float>(3, own_features),
                               out.take<std::int64_t>(4, texts),
                               out.take<float>(5, texts * classes),
                               out.take<float>(6, texts * pooled)};
    const TextDropout dropout{table.take<float>(0, known), unknown, std::get<0>(rates),
                              std::get<1>(rates)};
    if (noise.is_none())
        return text_batch(all, {some, texts}, dropout, classes, pooled, nullptr, parts);
    const Buffers state(nb::make_tuple(noise), "noise", Buffer::Access::write);
    state.refuse_overlap({&in, &chosen, &table, &out});
    return text_batch(all, {some, texts}, dropout, classes, pooled,
                      state.take<std::uint64_t>(0, 1), parts);
}

}  // namespace

void bind_text(nb::module_& m) {
    m.def("text_net_gradients", &gradients, "sizes"_a, "widths"_a, "weights"_a, "batch"_a,
          "gradients"_a, "scores"_a,
          "Write the gradients and scores of a wide and deep net; return its mean loss.");
    m.def("text_batch", &batch, "rows"_a, "numbers"_a, "dropped"_a, "unknown"_a, "rates"_a,
          "classes"_a, "noise"_a.none(), "batch"_a,
          "Write some rows as a batch, with dropout; return how many features it has.");
}

}  // namespace slipstream
