# The commands of the README. Each does its own set-up: packages, configuration, build.
#
#   make build     build/lockstep
#   make demo      train a small model by SFT, then by GRPO, and print what it learned (a few minutes on two cores)
#   make test      build everything and run every test
#   make bench     measure kernels beside their peers
#   make asan      the tests under the address and undefined-behaviour sanitizers
#   make tsan      the tests under the thread sanitizer
#   make fuzz      build the fuzz targets (clang) and run each for a minute
#   make soak      the tests with real deadlines: ranks killed and stopped, stalls noticed (wants an otherwise idle machine)
#   make clean     remove build folders

JOBS := $(shell nproc)

.DEFAULT_GOAL := build
.PHONY: build demo test bench asan tsan soak fuzz clean setup

setup:
	@scripts/setup.sh

build: setup
	@cmake --preset cpu >/dev/null
	@cmake --build build --target lockstep -j $(JOBS)

demo: build
	@build/lockstep demo configs/demo.toml

test: setup
	@cmake --preset cpu >/dev/null
	@cmake --build build -j $(JOBS)
	@ctest --test-dir build --output-on-failure -LE soak -j $(JOBS)

bench: setup
	@cmake --preset cpu >/dev/null
	@cmake --build build --target matmul_bench step_bench engine_bench -j $(JOBS)
	@env -u OPENBLAS_CORETYPE -u OPENBLAS_L2_SIZE build/ops/matmul_bench
	@for threads in 1 2; do for numerics in bf16 f32; do build/train/step_bench configs/demo.config.json $$threads $$numerics; done; done
	@for numerics in bf16 fp8; do build/rollout/engine_bench configs/bench_1024.config.json 1 $$numerics; done

asan: setup
	@cmake --preset asan >/dev/null
	@cmake --build build-asan -j $(JOBS)
	@ctest --test-dir build-asan --output-on-failure -LE soak -j $(JOBS)

tsan: setup
	@cmake --preset tsan >/dev/null
	@cmake --build build-tsan -j $(JOBS)
	@ctest --test-dir build-tsan --output-on-failure -LE soak -j $(JOBS)

soak: test
	@ctest --test-dir build --output-on-failure -L soak

fuzz:
	@scripts/fuzz.sh

clean:
	@rm -rf build build-asan build-tsan build-fuzz
