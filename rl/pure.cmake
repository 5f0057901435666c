# The part of rl/ that is pure arithmetic and text, included by rl/CMakeLists.txt. The tests link lockstep_rl, which that file
# makes of these sources and the loop's; it needs lockstep_io and xxhash.
set(RL_PURE_SOURCES advantage.cc arithmetic.cc passk.cc reward.cc)

foreach(name advantage arithmetic passk reward)
  lockstep_test(${name}_test ${name}_test.cc LINK lockstep_rl)
endforeach()
