// The Python interface of shared memory: segments, and updates of weights from slots.

#include "shared.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "board.h"
#include "buffers.h"
#include "ring.h"
#include "update.h"

namespace slipstream {

namespace nb = nanobind;
using namespace nb::literals;

namespace {

Shape shape_of(std::uint64_t learners, std::uint64_t slots, std::uint64_t slot_nbytes,
               std::uint64_t weights_nbytes) {
    const Shape shape{learners, slots, slot_nbytes, weights_nbytes};
    if (!Segment::nbytes(shape))
        refuse("no segment has " + std::to_string(learners) + " learners with " +
               std::to_string(slots) + " slots of " + std::to_string(slot_nbytes) +
               " bytes, and " + std::to_string(weights_nbytes) + " bytes of weights");
    return shape;
}

std::size_t segment_nbytes(std::uint64_t learners, std::uint64_t slots, std::uint64_t slot_nbytes,
                           std::uint64_t weights_nbytes) {
    return *Segment::nbytes(shape_of(learners, slots, slot_nbytes, weights_nbytes));
}

void format_segment(nb::handle memory, std::uint64_t learners, std::uint64_t slots,
                    std::uint64_t slot_nbytes, std::uint64_t weights_nbytes) {
    const Buffer buffer(memory, "memory", Buffer::Access::write);
    const Shape shape = shape_of(learners, slots, slot_nbytes, weights_nbytes);
    if (buffer.nbytes() != *Segment::nbytes(shape))
        refuse("memory has " + std::to_string(buffer.nbytes()) + " bytes where a segment takes " +
               std::to_string(*Segment::nbytes(shape)));
    Segment::format(buffer.data(), shape);
}

// A segment in memory that stays mapped for as long as this object lives.
class Rings {
  public:
    explicit Rings(nb::handle memory)
        : buffer_(memory, "memory", Buffer::Access::write), segment_(checked(buffer_)) {}

    std::uint64_t learners() const { return segment_.shape().learners; }
    std::uint64_t slots() const { return segment_.shape().slots; }
    std::size_t weights_at() const { return segment_.weights_at(); }

    std::size_t slot_at(std::uint64_t learner, std::uint64_t slot) const {
        known(learner);
        if (slot >= segment_.shape().slots) refuse("there is no slot " + std::to_string(slot));
        return segment_.slot_at(learner, slot);
    }

    std::optional<std::uint64_t> reserve(std::uint64_t learner, double limit_s) const {
        known(learner);
        const nb::gil_scoped_release unlocked;
        return segment_.reserve(learner, limit_s);
    }

    void publish(std::uint64_t learner) const { segment_.publish(known(learner)); }

    std::optional<std::pair<std::uint64_t, std::uint64_t>> next(std::uint64_t last,
                                                                double limit_s) const {
        const nb::gil_scoped_release unlocked;
        const auto ready = segment_.next(last, limit_s);
        if (!ready) return std::nullopt;
        return std::pair(ready->learner, ready->slot);
    }

    void rest(double limit_s) const {
        const nb::gil_scoped_release unlocked;
        segment_.rest(limit_s);
    }

    void release(std::uint64_t learner) const { segment_.release(known(learner)); }
    void discard(std::uint64_t learner, std::uint64_t pushed) const {
        const std::uint64_t taken = segment_.lane(known(learner)).taken.load();
        if (pushed < taken || pushed > this->pushed(learner))
            refuse("learner " + std::to_string(learner) + " has not published " +
                   std::to_string(pushed) + " slots");
        segment_.discard(learner, pushed);
    }
    std::uint64_t pushed(std::uint64_t learner) const {
        return segment_.lane(known(learner)).pushed.load();
    }
    std::uint64_t taken(std::uint64_t learner) const {
        return segment_.lane(known(learner)).taken.load();
    }

    std::uint64_t version() const { return segment_.header().version.load(); }
    void set_version(std::uint64_t version) { segment_.header().version.store(version); }
    std::uint64_t advance() { return segment_.header().version.fetch_add(1) + 1; }
    std::uint64_t beat() const { return segment_.header().beat.load(); }
    void beat_once() const { segment_.beat(); }
    bool closing() const { return segment_.header().closing.load() != 0; }
    void close() const {
        segment_.header().closing.store(1);
        segment_.ring();
    }

    bool begin_reading(std::uint64_t learner, double limit_s) const {
        known(learner);
        const nb::gil_scoped_release unlocked;
        return segment_.begin_reading(learner, limit_s);
    }
    bool reading(std::uint64_t learner) const {
        return segment_.lane(known(learner)).reading.load() != 0;
    }
    void end_reading(std::uint64_t learner) const { segment_.end_reading(known(learner)); }

    bool begin_writing(std::uint64_t who, double limit_s) const {
        const nb::gil_scoped_release unlocked;
        return segment_.begin_writing(who, limit_s);
    }
    void end_writing() const { segment_.end_writing(); }
    void release_dead(std::uint64_t who) const { segment_.release_dead(who); }

  private:
    static std::byte* checked(const Buffer& buffer) {
        if (reinterpret_cast<std::uintptr_t>(buffer.data()) % 64 != 0)
            refuse("memory is not at an address that 64 divides");
        if (const char* reason = Segment::check(buffer.data(), buffer.nbytes()))
            refuse(std::string("memory is no segment: ") + reason);
        return buffer.data();
    }

    std::uint64_t known(std::uint64_t learner) const {
        if (learner >= learners()) refuse("there is no learner " + std::to_string(learner));
        return learner;
    }

    Buffer buffer_;
    Segment segment_;
};

std::size_t board_nbytes(std::uint64_t workers, std::uint64_t tensors) {
    const auto found = Board::nbytes(workers, tensors);
    if (!found)
        refuse("no board has " + std::to_string(workers) + " workers and " +
               std::to_string(tensors) + " tensors");
    return *found;
}

// A board in memory that stays mapped for as long as this object lives.
class HostBoard {
  public:
    HostBoard(nb::handle memory, std::uint64_t workers, std::uint64_t tensors)
        : buffer_(memory, "memory", Buffer::Access::write),
          board_(checked(buffer_, workers, tensors), workers, tensors) {}

    std::uint64_t workers() const { return board_.workers(); }
    std::uint64_t tensors() const { return board_.tensors(); }

    void note(std::uint64_t worker, std::uint64_t round, std::uint64_t number) const {
        board_.note(known(worker), round, number);
    }
    std::uint64_t noted(std::uint64_t worker, std::uint64_t round) const {
        return board_.noted(known(worker), round);
    }
    void publish(std::uint64_t worker, std::uint64_t tensor, std::uint64_t round, bool present,
                 std::uint64_t step) const {
        board_.publish(known(worker), held(tensor), round, present, step);
    }
    void publish_result(std::uint64_t tensor, std::uint64_t round, bool present) const {
        board_.publish(workers(), held(tensor), round, present, 0);
    }
    std::uint64_t step(std::uint64_t worker, std::uint64_t tensor) const {
        return board_.step(known(worker), held(tensor));
    }
    std::optional<bool> published(std::uint64_t worker, std::uint64_t tensor,
                                  std::uint64_t round) const {
        return board_.published(known(worker), held(tensor), round);
    }
    std::optional<bool> result(std::uint64_t tensor, std::uint64_t round) const {
        return board_.published(workers(), held(tensor), round);
    }
    std::vector<std::uint64_t> arrived(std::uint64_t round,
                                       const std::vector<std::uint64_t>& wanted) const {
        for (const std::uint64_t tensor : wanted) held(tensor);
        return board_.arrived(round, wanted);
    }
    std::uint32_t bell(bool of_results) const { return board_.bell(which(of_results)); }
    void sleep(bool of_results, std::uint32_t seen, double limit_s) const {
        const nb::gil_scoped_release unlocked;
        board_.sleep(which(of_results), seen, limit_s);
    }

  private:
    static std::byte* checked(const Buffer& buffer, std::uint64_t workers, std::uint64_t tensors) {
        if (reinterpret_cast<std::uintptr_t>(buffer.data()) % 64 != 0)
            refuse("memory is not at an address that 64 divides");
        if (buffer.nbytes() < board_nbytes(workers, tensors))
            refuse("memory has " + std::to_string(buffer.nbytes()) + " bytes where a board takes " +
                   std::to_string(board_nbytes(workers, tensors)));
        return buffer.data();
    }

    static Board::Bell which(bool of_results) {
        return of_results ? Board::results : Board::contributions;
    }
    std::uint64_t known(std::uint64_t worker) const {
        if (worker >= workers()) refuse("there is no worker " + std::to_string(worker));
        return worker;
    }
    std::uint64_t held(std::uint64_t tensor) const {
        if (tensor >= tensors()) refuse("there is no tensor " + std::to_string(tensor));
        return tensor;
    }

    Buffer buffer_;
    Board board_;
};

// weights_at, slot_at, numbers_at, count, width, group, is_double
using Told = std::tuple<std::size_t, std::size_t, std::size_t, std::size_t, std::size_t,
                        std::size_t, bool>;

Rule rule_for(const std::string& name) {
    if (name == "sgd") return Rule::sgd;
    if (name == "adam") return Rule::adam;
    if (name == "rmsprop") return Rule::rmsprop;
    if (name == "adagrad") return Rule::adagrad;
    refuse("rule must be sgd, adam, rmsprop or adagrad, not '" + name + "'");
}

Update make_update(const std::string& rule, const std::vector<Told>& told, std::size_t groups) {
    std::vector<Place> places;
    for (const auto& [weights_at, slot_at, numbers_at, count, width, group, is_double] : told) {
        const std::size_t size = is_double ? sizeof(double) : sizeof(float);
        if (weights_at % size || slot_at % size || numbers_at % sizeof(std::int64_t))
            refuse("a tensor is not where its values can be");
        if (group >= groups) refuse("there is no group " + std::to_string(group));
        if (width != 0 && count % width != 0) refuse("a tensor does not consist of whole rows");
        places.push_back({weights_at, slot_at, numbers_at, count, width, group, is_double});
    }
    return Update(rule_for(rule), std::move(places), groups);
}

const std::byte* at_least(const Buffer& buffer, const char* name, std::size_t nbytes) {
    if (buffer.nbytes() < nbytes)
        refuse(std::string(name) + " has " + std::to_string(buffer.nbytes()) +
               " bytes where the update needs " + std::to_string(nbytes));
    if (reinterpret_cast<std::uintptr_t>(buffer.data()) % sizeof(double) != 0)
        refuse(std::string(name) + " is not at an address that 8 divides");
    return buffer.data();
}

void apply(Update& update, nb::handle weights, nb::handle slot, nb::sequence memories,
           nb::handle steps) {
    const Buffer target(weights, "weights", Buffer::Access::write);
    const Buffer source(slot, "slot", Buffer::Access::write);
    if (nb::len(memories) != 3) refuse("an optimizer has three memories");
    const Buffer first(memories[0], "first", Buffer::Access::write);
    const Buffer second(memories[1], "second", Buffer::Access::write);
    const Buffer third(memories[2], "third", Buffer::Access::write);
    const Buffer counts(steps, "steps", Buffer::Access::write);
    at_least(target, "weights", update.weights_nbytes());
    at_least(source, "slot", update.slot_nbytes());
    at_least(first, "first", update.weights_nbytes());
    at_least(second, "second", update.weights_nbytes());
    at_least(third, "third", update.weights_nbytes());
    at_least(counts, "steps", update.tensors() * sizeof(std::uint64_t));
    if (overlap(target, source)) refuse("slot overlaps weights");
    const char* reason;
    {
        const nb::gil_scoped_release unlocked;
        reason = update.apply(target.data(), source.data(),
                              {first.data(), second.data(), third.data(),
                               reinterpret_cast<std::uint64_t*>(counts.data())});
    }
    if (reason != nullptr) refuse(reason);
}

void add_rows_to(nb::handle out, nb::handle numbers, nb::handle ids, nb::handle values,
                 std::size_t width, bool is_double) {
    const Buffer target(out, "out", Buffer::Access::write);
    const Buffer noted(numbers, "numbers", Buffer::Access::write);
    const Buffer named(ids, "ids", Buffer::Access::read);
    const Buffer source(values, "values", Buffer::Access::read);
    const std::size_t row = width * (is_double ? sizeof(double) : sizeof(float));
    const std::size_t rows = named.nbytes() / sizeof(std::int64_t);
    if (width == 0 || target.nbytes() % row != 0) refuse("out does not consist of whole rows");
    if (source.nbytes() != rows * row) refuse("values does not have a row for each of ids");
    if (noted.nbytes() < named.nbytes()) refuse("numbers has no room for all of ids");
    if (overlap(target, source) || overlap(noted, named)) refuse("out overlaps what is added");
    const std::size_t all = target.nbytes() / row;
    auto* kept = reinterpret_cast<std::int64_t*>(noted.data());
    const auto* told = reinterpret_cast<const std::int64_t*>(named.data());
    const auto run = [&]<typename T>(T*) {
        return add_rows(reinterpret_cast<T*>(target.data()), kept, all, width, told,
                        reinterpret_cast<const T*>(source.data()), rows);
    };
    if (!(is_double ? run(static_cast<double*>(nullptr)) : run(static_cast<float*>(nullptr))))
        refuse("out has no such row");
}

}  // namespace

void bind_shared(nb::module_& m) {
    m.def("add_rows", &add_rows_to, "out"_a, "numbers"_a, "ids"_a, "values"_a, "width"_a,
          "is_double"_a, "Add rows of values to those of out that ids names; note their numbers.");
    m.def("segment_nbytes", &segment_nbytes, "learners"_a, "slots"_a, "slot_nbytes"_a,
          "weights_nbytes"_a, "The bytes that a segment of this shape takes.");
    m.def("format_segment", &format_segment, "memory"_a, "learners"_a, "slots"_a, "slot_nbytes"_a,
          "weights_nbytes"_a, "Make zeroed memory a segment.");
    m.def("board_nbytes", &board_nbytes, "workers"_a, "tensors"_a, "The bytes that a board takes.");
    nb::class_<HostBoard>(m, "HostBoard", "What the workers of a host tell each other of rounds.")
        .def(nb::init<nb::handle, std::uint64_t, std::uint64_t>(), "memory"_a, "workers"_a,
             "tensors"_a)
        .def("note", &HostBoard::note, "worker"_a, "round_"_a, "number"_a)
        .def("noted", &HostBoard::noted, "worker"_a, "round_"_a)
        .def("publish", &HostBoard::publish, "worker"_a, "tensor"_a, "round_"_a, "present"_a,
             "step"_a = 0)
        .def("step", &HostBoard::step, "worker"_a, "tensor"_a)
        .def("publish_result", &HostBoard::publish_result, "tensor"_a, "round_"_a, "present"_a)
        .def("published", &HostBoard::published, "worker"_a, "tensor"_a, "round_"_a)
        .def("result", &HostBoard::result, "tensor"_a, "round_"_a)
        .def("arrived", &HostBoard::arrived, "round_"_a, "wanted"_a)
        .def("bell", &HostBoard::bell, "of_results"_a)
        .def("sleep", &HostBoard::sleep, "of_results"_a, "seen"_a, "limit_s"_a);
    nb::class_<Rings>(m, "Rings", "A segment: weights, and a ring of slots for each learner.")
        .def(nb::init<nb::handle>(), "memory"_a)
        .def_prop_ro("learners", &Rings::learners)
        .def_prop_ro("slots", &Rings::slots)
        .def_prop_ro("weights_at", &Rings::weights_at)
        .def("slot_at", &Rings::slot_at, "learner"_a, "slot"_a)
        .def("reserve", &Rings::reserve, "learner"_a, "limit_s"_a,
             "The slot to fill, once there is room; None if there is none within the limit.")
        .def("publish", &Rings::publish, "learner"_a, "The reserved slot is the server's now.")
        .def("next", &Rings::next, "last"_a, "limit_s"_a,
             "A learner after `last`, in turn, and its oldest slot; None if none comes in time.")
        .def("rest", &Rings::rest, "limit_s"_a, "Sleep, and be well.")
        .def("release", &Rings::release, "learner"_a, "Its oldest slot is the learner's again.")
        .def("discard", &Rings::discard, "learner"_a, "pushed"_a,
             "So is every one of the first so many.")
        .def("pushed", &Rings::pushed, "learner"_a)
        .def("taken", &Rings::taken, "learner"_a)
        .def_prop_rw("version", &Rings::version, &Rings::set_version)
        .def("advance", &Rings::advance, "One more update has been made; returns how many.")
        .def_prop_ro("beat", &Rings::beat)
        .def("beat_once", &Rings::beat_once, "The server is well.")
        .def_prop_ro("closing", &Rings::closing)
        .def("close", &Rings::close, "No more will be pushed.")
        .def("begin_reading", &Rings::begin_reading, "learner"_a, "limit_s"_a)
        .def("reading", &Rings::reading, "learner"_a)
        .def("end_reading", &Rings::end_reading, "learner"_a)
        .def("begin_writing", &Rings::begin_writing, "who"_a, "limit_s"_a)
        .def("end_writing", &Rings::end_writing)
        .def("release_dead", &Rings::release_dead, "who"_a, "One that has died reads and writes no more.");
    nb::class_<Update>(m, "Update", "Updates of weights in place, from slots.")
        .def("__init__",
             [](Update* self, const std::string& rule, const std::vector<Told>& places,
                std::size_t groups) { new (self) Update(make_update(rule, places, groups)); },
             "rule"_a, "places"_a, "groups"_a)
        .def_prop_ro("weights_nbytes", &Update::weights_nbytes)
        .def_prop_ro("slot_nbytes", &Update::slot_nbytes)
        .def("apply", &apply, "weights"_a, "slot"_a, "memories"_a, "steps"_a);
}

}  // namespace slipstream
