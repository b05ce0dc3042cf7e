// The gather of a persistent forward: lists of the rows of the block's tokens, and what these rows add up to.
#pragma once

#include "walk.cuh"

struct Gather : Walk {
    // Calls visit(place in the lists, query, place in [tokens, width]) for the entries that this thread brings.
    template <class Visit>
    __device__ __forceinline__ void visit_lists(const Step& step, int first, const Visit& visit) const {
        // Divided here each time, since registers that hold a quotient are dearer.
        int thread = threadIdx.x, lanes = W + R;
        ptx::renew(thread);
        ptx::renew(lanes);
        const int count = min(list_tokens, own - first), tokens_on = THREADS / lanes;
        const int first_token = thread / lanes, lanes_on = THREADS - tokens_on * lanes;
        for (int t = first_token, lane = thread - t * lanes; t < count; t += tokens_on, lane += lanes_on) {
            if (lane >= lanes) {
                lane -= lanes;
                if (++t == count) break;
            }
            const int i = token(first + t);
            if (i >= step.chunk.tokens) continue;
            const bool query = lane >= W;
            const int width = query ? R : W, n = query ? lane - W : lane;
            const int group = n & groups - 1;
            const int place = group * (width >> group_shift) + min(group, width & groups - 1) + (n >> group_shift);
            visit(t * lanes + (query ? W : 0) + place, query, static_cast<long long>(i) * width + n);
        }
    }
    __device__ __forceinline__ void fetch_lists(const Step& step, int first) const {
        visit_lists(step, first, [&](int at, bool query, long long cell) {
            const int width = query ? R : W;
            const long long index = step.chunk.first_row * width + cell;
            const float* const from = (query ? q_w : k_eff) + step.n * C * width + cell;
            Entry* const to = entries + at;
            if (wide_index) {
                const int* const halves =
                    reinterpret_cast<const int*>(static_cast<const long long*>(query ? q_idx : k_idx) + index);
                ptx::copy_async_4(&to->slot, halves);
                ptx::copy_async_4(&to->weight, halves + 1);
                ptx::copy_async_4(waiting + at, from);
            } else {
                ptx::copy_async_4(&to->slot, static_cast<const int*>(query ? q_idx : k_idx) + index);
                ptx::copy_async_4(&to->weight, from);
            }
        });
        ptx::copy_commit();
    }
    // Turns the indices that this thread has fetched into slots.
    __device__ __forceinline__ void resolve_lists(const Step& step, int first) const {
        ptx::copy_wait<0>();
        visit_lists(step, first, [&](int at, bool, long long) {
            if (wide_index) {
                long long row;
                memcpy(&row, entries + at, sizeof(row));
                entries[at] = Entry{slot_within(row, first_slot, S), waiting[at]};
            } else {
                entries[at].slot = slot_within(entries[at].slot, first_slot, S);
            }
        });
    }

    __device__ __forceinline__ void run(const Step& step) const {
        for (int first = 0; first < own; first += list_tokens) {
            if (first > 0) {
                __syncthreads();
                fetch_lists(step, first);
                resolve_lists(step, first);
                __syncthreads();
            }
            const int count = min(list_tokens, own - first);
            for (int one = threadIdx.x / WORDS; one < 2 * count; one += ROWS) {
                const bool query = one >= count;
                const int t = query ? one - count : one;
                if (token(first + t) < C) gather_token(step, query, first + t, entries + t * (W + R) + (query ? W : 0));
            }
        }
    }
    __device__ __forceinline__ void gather_token(const Step& step, bool query, int t, const Entry* list) const {
        const int word = threadIdx.x % WORDS, column = slice + word * VECTOR, i = token(t);
        float total[VECTOR] = {};
        if (i < step.chunk.tokens && column < D) {
            BankWord given{};
            if (!query) given = load_v(v + (step.chunk.first_row + i) * D + column);
            sum_rows(list, query, column, total);
            if (!query) {
                float value[VECTOR];
                unpack_pairs<BANK, VECTOR>(given, value);
#pragma unroll
                for (int c = 0; c < VECTOR; ++c) total[c] = value[c] - total[c];
            }
        }
        if (query) {
            store_slice(inter + t * COLUMNS, word, total);
        } else {
            for (int other = 0; other < blocks; ++other)
                store_slice(ptx::map_shared(residual, other) + i * COLUMNS, word, total);
        }
    }
    __device__ __forceinline__ BankWord load_v(const BANK* from) const {
        BankWord word;
        if (v_words) {
            word = ptx::load_readonly(reinterpret_cast<const BankWord*>(from));
        } else {
            BANK values[VECTOR];
#pragma unroll
            for (int c = 0; c < VECTOR; ++c) values[c] = from[c];
            memcpy(&word, values, sizeof(word));
        }
        return word;
    }
    __device__ __forceinline__ void sum_rows(const Entry* list, bool query, int column, float (&total)[VECTOR]) const {
        const int lanes = query ? R : W;
        const Rows rows = rows_at(column);
#if SAVE  // what is kept fills L2 too: rows of reads leave it before those of writes, which are read once more
        const ptx::Eviction eviction = query ? ptx::evict_first() : ptx::evict_normal();
        const auto ask = [&](BankWord* to, const BANK* from) { ask_row(to, from, eviction); };
#else
        const auto ask = [&](BankWord* to, const BANK* from) { ask_row(to, from); };
#endif
        const int least = lanes >> group_shift, extra = lanes & groups - 1;
        int group = 0, end = least + (extra > 0);  // of the group's entries
        float sum[VECTOR] = {};
        const auto ask_rows = [&](int batch, int first) {
            int slot[BATCH];
#pragma unroll
            for (int l = 0; l < BATCH; ++l) slot[l] = first + l < lanes ? list[first + l].slot : -1;
#pragma unroll
            for (int l = 0; l < BATCH; ++l)
                if (slot[l] >= 0) ask(arrival(batch, l), rows.row(slot[l]));
            ptx::copy_commit();
        };
        const auto add_row = [&](int batch, int l, float weight) {
            float value[VECTOR];
            unpack_pairs<BANK, VECTOR>(*arrival(batch, l), value);
#pragma unroll
            for (int c = 0; c < VECTOR; ++c) sum[c] = fmaf(weight, value[c], sum[c]);
        };
        const auto end_group = [&] {
#pragma unroll
            for (int c = 0; c < VECTOR; ++c) {
                total[c] = group == 0 ? sum[c] : total[c] + sum[c];
                sum[c] = 0.0f;
            }
            ++group;
            end += least + (group < extra);
        };
        const auto add_rows = [&](int batch, int first) {
            Entry entry[BATCH];
            int absent = 0;  // its sign bit: some entry is
#pragma unroll
            for (int l = 0; l < BATCH; ++l) {
                entry[l] = first + l < lanes ? list[first + l] : Entry{-1, 0.0f};
                absent |= entry[l].slot;
            }
            if (absent >= 0 && first + BATCH <= end) {  // as nearly always: no test a row
#pragma unroll
                for (int l = 0; l < BATCH; ++l) add_row(batch, l, entry[l].weight);
                if (first + BATCH == end) end_group();
            } else {
#pragma unroll
                for (int l = 0; l < BATCH; ++l) {
                    if (first + l >= lanes) continue;
                    if (entry[l].slot >= 0) add_row(batch, l, entry[l].weight);
                    if (first + l + 1 == end) end_group();
                }
            }
        };
#pragma unroll
        for (int batch = 0; batch < RING; ++batch) ask_rows(batch, batch * BATCH);
        for (int first = 0, batch = 0; first < lanes; first += BATCH) {
            ptx::copy_wait<RING - 1>();
            add_rows(batch, first);
            ask_rows(batch, first + RING * BATCH);
            batch = batch + 1 < RING ? batch + 1 : 0;
        }
        if (lanes < groups) {  // a group without rows adds 0, which makes -0 a 0
#pragma unroll
            for (int c = 0; c < VECTOR; ++c) total[c] += 0.0f;
        }
    }
};
