#pragma once
// Three kinds of failure, three forms (CONTRIBUTING.md, "Errors"):
//   the world failed (file, user text, peer): Status or Result<T>, which the caller must look at;
//   we failed (wrong shape, broken invariant): CHECK, always on, prints the values and stops the process;
//   one sample failed: data, a finish_reason on its record.
// A Status message says where, what was seen, what was wanted, and what to do.
// Device compilers do not read fmt: in what they compile, a failed CHECK tells its place and expression, without values.

#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "core/host_device.h"

#if !LOCKSTEP_DEVICE_COMPILER
#include <fmt/core.h>
#endif

namespace lockstep {

class [[nodiscard]] Status {
 public:
  Status() = default;
  static Status ok() { return {}; }
  static Status error(std::string message) {
    Status s;
    s.message_ = message.empty() ? "unknown error" : std::move(message);
    return s;
  }
  bool is_ok() const { return message_.empty(); }
  explicit operator bool() const { return is_ok(); }
  const std::string& message() const { return message_; }

 private:
  std::string message_;  // empty means ok
};

#if !LOCKSTEP_DEVICE_COMPILER
template <typename... A>
Status errorf(fmt::format_string<A...> format, A&&... args) {
  return Status::error(fmt::format(format, std::forward<A>(args)...));
}
#endif

template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : v_(std::move(value)) {}
  Result(Status status) : v_(std::move(status)) {}
  bool is_ok() const { return std::holds_alternative<T>(v_); }
  explicit operator bool() const { return is_ok(); }
  Status status() const { return is_ok() ? Status::ok() : std::get<Status>(v_); }
  const std::string& message() const { return std::get<Status>(v_).message(); }
  T& value() { return std::get<T>(v_); }
  const T& value() const { return std::get<T>(v_); }
  T take() { return std::move(std::get<T>(v_)); }

 private:
  std::variant<T, Status> v_;
};

// Returns the failed Status of `expr` from the enclosing function.
#define LOCKSTEP_RETURN_IF_ERROR(expr)                                 \
  do {                                                                 \
    if (::lockstep::Status status_ = (expr); !status_) return status_; \
  } while (0)

// What else is told of a failed CHECK, before the process aborts: called on the thread that failed, which holds whatever locks it held, and
// perhaps on two threads at once. nullptr: nobody.
using CheckHandler = void (*)(const char* message);
void set_check_handler(CheckHandler handler);

// Prints "FILE:LINE: CHECK failed: EXPR MESSAGE" to standard error, tells the handler, and aborts.
[[noreturn]] void check_failed(const char* file, int line, const char* expr, std::string message);

// CHECK(condition) or CHECK(condition, "format {}", values...).
#if LOCKSTEP_DEVICE_COMPILER
#define CHECK(cond, ...) ((cond) ? void() : ::lockstep::check_failed(__FILE__, __LINE__, #cond, {}))
#else
#define CHECK(cond, ...)                                                                          \
  do {                                                                                            \
    if (!(cond)) [[unlikely]]                                                                     \
      ::lockstep::check_failed(__FILE__, __LINE__, #cond, ::lockstep::check_message(__VA_ARGS__)); \
  } while (0)

inline std::string check_message() { return {}; }
template <typename... A>
std::string check_message(fmt::format_string<A...> format, A&&... args) {
  return fmt::format(format, std::forward<A>(args)...);
}

#define LOCKSTEP_CHECK_OP(a, op, b)                                                        \
  do {                                                                                     \
    const auto& check_a_ = (a);                                                            \
    const auto& check_b_ = (b);                                                            \
    if (!(check_a_ op check_b_)) [[unlikely]]                                              \
      ::lockstep::check_failed(__FILE__, __LINE__, #a " " #op " " #b,                      \
                               fmt::format("({} against {})", check_a_, check_b_));        \
  } while (0)
#define CHECK_EQ(a, b) LOCKSTEP_CHECK_OP(a, ==, b)
#define CHECK_LE(a, b) LOCKSTEP_CHECK_OP(a, <=, b)
#define CHECK_LT(a, b) LOCKSTEP_CHECK_OP(a, <, b)
#define CHECK_GE(a, b) LOCKSTEP_CHECK_OP(a, >=, b)
#define CHECK_GT(a, b) LOCKSTEP_CHECK_OP(a, >, b)
#endif  // !LOCKSTEP_DEVICE_COMPILER

}  // namespace lockstep
