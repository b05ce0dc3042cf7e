// The GWR of a persistent backward: what the gradient rows of the slots that the block's tokens write add up to. A warp
// takes one token at a time; its teams take every TEAMS-th of the 16 groups of rows.
#pragma once

#include "walk_back.cuh"

#define ROW_GROUPS 16  // GROUPS of gwr.cu

struct Gwr : BackWalk {
    // A row of a team: the k-th of the group that the team takes in this round.
    struct Place {
        int round, k;

        __device__ __forceinline__ int entry(int team) const {
            return round * TEAMS + team + ROW_GROUPS * k;
        }
        __device__ __forceinline__ void advance(int most) {
            if (++k == most) k = 0, ++round;
        }
    };

    __device__ __forceinline__ int list_of(int t) const {
        return t % list_tokens * W;
    }
    // Starts copying the list of token `t`, for this warp alone.
    __device__ __forceinline__ void fetch_list(long long call, const Chunk& chunk, int t) const {
        const int i = token(t), list = list_of(t);
        if (i < chunk.tokens) {
            const long long index = (chunk.first_row + i) * W;
            const float* const from = write_weight + (call * C + i) * W;
#pragma unroll 1
            for (int n = lane(); n < W; n += 32) {
                Entry* const to = entries() + list + n;
                if (wide_index) {
                    ptx::copy_async_8(to, static_cast<const long long*>(k_idx) + index + n);
                    ptx::copy_async_4(waiting() + list + n, from + n);
                } else {
                    ptx::copy_async_4(&to->slot, static_cast<const int*>(k_idx) + index + n);
                    ptx::copy_async_4(&to->weight, from + n);
                }
            }
        }
        ptx::copy_commit();
    }
    // The lists of this warp's first tokens.
    __device__ __forceinline__ void fetch_lists(long long call, const Chunk& chunk) const {
        for (int t = warp(); t < min(list_tokens, own); t += WARPS) fetch_list(call, chunk, t);
    }
    // Turns the indices of a list into slots.
    __device__ __forceinline__ void resolve_list(int list) const {
        ptx::copy_wait<0>();
#pragma unroll 1
        for (int n = lane(); n < W; n += 32) {
            Entry* const entry = entries() + list + n;
            if (wide_index) {
                long long row;
                memcpy(&row, entry, sizeof(row));
                *entry = Entry{slot_within(row, first_slot, S), waiting()[list + n]};
            } else {
                entry->slot = slot_within(entry->slot, first_slot, S);
            }
        }
        __syncwarp();
    }

    __device__ __forceinline__ void run(const Step& step) const {
        for (int t = warp(); t < own; t += WARPS) {
            const int i = token(t), list = list_of(t);
            if (i >= C) break;
            float* const dots = partial_k_pd + (static_cast<long long>(step.partial) * C + i) * W;
            float total[WORD] = {};
            if (i < step.chunk.tokens) {
                resolve_list(list);
                add_token(step, i, entries() + list, total);
                __syncwarp();
#pragma unroll 1
                for (int n = lane(); n < W; n += 32) dots[n] = entries()[list + n].weight;
            } else {
#pragma unroll 1
                for (int n = lane(); n < W; n += 32) dots[n] = 0.0f;
            }
#pragma unroll 1
            for (int other = team(); other < blocks; other += TEAMS)
                store_slice(ptx::map_shared(written(), other) + i * COLUMNS, word(), total);
            __syncwarp();
            if (t + list_tokens < own) fetch_list(step.call, step.chunk, t + list_tokens);
        }
    }
    __device__ __forceinline__ void load_rows(const Entry* list, Place& place, int most,
                                              RowSlice<GRADIENT> (&row)[BATCH]) const {
        const GRADIENT* const rows = gradient_bank + first_slot * D;
#pragma unroll
        for (int l = 0; l < BATCH; ++l, place.advance(most)) {
            const int n = place.entry(team());
            const int slot = place.round < ROW_GROUPS / TEAMS && n < W ? list[n].slot : -1;
            if (slot >= 0) row[l].load(rows + static_cast<long long>(slot) * D, column(), D);
        }
    }
    // Adds the rows of a token's list; the dots of its rows take the place of their weights.
    __device__ __forceinline__ void add_token(const Step& step, int i, Entry* list, float (&total)[WORD]) const {
        const int most = (W + ROW_GROUPS - 1) / ROW_GROUPS, count = ROW_GROUPS / TEAMS * most;
        const float beta = strength[step.call * C + i];
        RowSlice<float> change;
        change.load(err + (step.call * C + i) * D, column(), D);
        float delta[WORD], sum[WORD] = {};
        change.word(0, delta);
#pragma unroll
        for (int c = 0; c < WORD; ++c) delta[c] *= beta;

        const auto add_rows = [&](int first, Place place, const RowSlice<GRADIENT>(&row)[BATCH]) {
            float share[BATCH];
#pragma unroll
            for (int l = 0; l < BATCH; ++l, place.advance(most)) {
                share[l] = 0.0f;
                if (first + l >= count) continue;
                const int n = place.entry(team());
                const Entry entry = n < W ? list[n] : Entry{-1, 0.0f};
                if (entry.slot >= 0) {
                    float value[WORD];
                    row[l].word(0, value);
#pragma unroll
                    for (int c = 0; c < WORD; ++c) {
                        share[l] = fmaf(value[c], delta[c], share[l]);
                        sum[c] = fmaf(entry.weight, value[c], sum[c]);
                    }
                }
                if (place.k + 1 == most) end_round(place.round, sum, total);
            }
            const float dot = add_lanes(share);
            const int at = first + summed<BATCH>(), n = Place{at / most, at % most}.entry(team());
            __syncwarp();
            if (sums_first<BATCH>() && at < count && n < W) list[n].weight = dot;
        };
        // One batch is under way while the one before it is added. A loop of one batch, since its code is long and every
        // step goes through all of it.
        RowSlice<GRADIENT> row[BATCH], behind[BATCH];
        Place ahead{0, 0};
        load_rows(list, ahead, most, row);
#pragma unroll 1
        for (int first = 0; first < count; first += BATCH) {
            load_rows(list, ahead, most, behind);
            add_rows(first, Place{first / most, first % most}, row);
#pragma unroll
            for (int l = 0; l < BATCH; ++l) row[l] = behind[l];
        }
    }
    // Adds the teams' sums, group by group, to every lane's total.
    __device__ __forceinline__ void end_round(int round, float (&sum)[WORD], float (&total)[WORD]) const {
#pragma unroll
        for (int c = 0; c < WORD; ++c) {
#pragma unroll
            for (int other = 0; other < TEAMS; ++other) {
                const float of_group = __shfl_sync(~0u, sum[c], other * LANES + word());
                total[c] = round == 0 && other == 0 ? of_group : total[c] + of_group;
            }
            sum[c] = 0.0f;
        }
    }
};
