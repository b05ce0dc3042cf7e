// Lanes of a warp that hold the same small number.
#pragma once

// The lanes among `lanes` whose number, of BITS bits, is this lane's own. Ballots are faster than __match_any_sync.
template <int BITS>
static __device__ __forceinline__ unsigned peers_of(unsigned number, unsigned lanes) {
#pragma unroll
    for (int bit = 0; bit < BITS; ++bit) {
        const int sign = static_cast<int>(number << (31 - bit));  // the bit, where a shift spreads it
        lanes &= ~(__ballot_sync(0xffffffffu, sign < 0) ^ sign >> 31);
    }
    return lanes;
}
