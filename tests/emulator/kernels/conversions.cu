// The conversions of numeric.cuh and snapshot.cuh one by one, for tests that hold the emulator's to PyTorch's and to the GPU's.
//
// Grid    ceil(n / 64). Block: 64 threads.
// Reads   x [2n] floats, halves [n]. Writes bf16, fp16 [2n], bf16_pairs, fp16_pairs [n] (each the pair x[2i], x[2i+1]),
//         wide_bf16, wide_fp16 [n] (halves as floats), decays [2n] (exp_decay of x), fp8 [n] (pairs of bytes), int4 [2n].
#include "numeric.cuh"
#include "snapshot.cuh"

extern "C" __global__ void __launch_bounds__(64)
    conversions(const float* x, const unsigned short* halves, unsigned short* bf16, unsigned short* fp16,
                unsigned* bf16_pairs, unsigned* fp16_pairs, float* wide_bf16, float* wide_fp16, float* decays,
                unsigned short* fp8, unsigned char* int4, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float pair[2];
    load_values_readonly<2>(x + 2 * i, pair);
    for (int j = 0; j < 2; ++j) {
        bf16[2 * i + j] = from_float<Bf16>(pair[j]).bits;
        fp16[2 * i + j] = from_float<Fp16>(pair[j]).bits;
        decays[2 * i + j] = exp_decay(pair[j]);
        int4[2 * i + j] = static_cast<unsigned char>(int4_code(int4_clamp(pair[j])));
    }
    bf16_pairs[i] = pack<Bf16, 2>(pair);
    fp16_pairs[i] = pack<Fp16, 2>(pair);
    fp8[i] = fp8x2_from_floats(pair[0], pair[1]);
    wide_bf16[i] = to_float(Bf16{halves[i]});
    wide_fp16[i] = to_float(Fp16{halves[i]});
}
