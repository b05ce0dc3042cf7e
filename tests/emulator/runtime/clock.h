// Vector clocks: what each thread of a cluster has seen of the others.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

namespace emulator {

using Seen = std::shared_ptr<const std::vector<uint32_t>>;

// The clock of one thread. Threads that met at a barrier share what all of them had seen there.
struct Clock {
    Seen seen;  // its entry of this thread may be old
    uint32_t own = 0;
    unsigned number = 0;

    uint32_t at(unsigned thread) const {
        return thread == number ? own : (*seen)[thread];
    }
};

// Element by element, the latest of several clocks.
class JoinedClocks {
  public:
    void reset(size_t threads) {
        all_.assign(threads, 0);
        latest_ = nullptr;
    }
    void add(const Seen& seen) {
        if (seen == latest_) return;
        latest_ = seen;
        for (size_t i = 0; i < all_.size(); ++i) all_[i] = std::max(all_[i], (*seen)[i]);
    }
    void add(const Clock& clock) {
        add(clock.seen);
        all_[clock.number] = std::max(all_[clock.number], clock.own);
    }
    Seen seen() const {
        return std::make_shared<const std::vector<uint32_t>>(all_);
    }

  private:
    std::vector<uint32_t> all_;
    Seen latest_;  // added last
};

}  // namespace emulator
