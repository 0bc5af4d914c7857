"""The CPU backend in C++: the forward step of a Llama-family decoder as one call, in bfloat16 or int8, and one that chooses tokens.

`support` says whether it can run here and run a model, `model.CpuModel` runs it; `csrc/` has the kernels, which `build` compiles
when the package is installed. `sampling.kernels` calls the other one.
Must not know: sampling parameters, sequences, anything above a flat batch.
"""
