#include "io/unicode.h"

#include <algorithm>

#include <utf8proc.h>

namespace lockstep {

namespace {

uint8_t flags_of(uint32_t c) {
  uint8_t flags = 0;
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(c))) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO: flags = kLetter; break;
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME: flags = kMark; break;
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_NO: flags = kNumber; break;
    case UTF8PROC_CATEGORY_PC:
    case UTF8PROC_CATEGORY_PD:
    case UTF8PROC_CATEGORY_PS:
    case UTF8PROC_CATEGORY_PE:
    case UTF8PROC_CATEGORY_PI:
    case UTF8PROC_CATEGORY_PF:
    case UTF8PROC_CATEGORY_PO:
    case UTF8PROC_CATEGORY_SM:
    case UTF8PROC_CATEGORY_SC:
    case UTF8PROC_CATEGORY_SK:
    case UTF8PROC_CATEGORY_SO: flags = kPunctuation; break;
    // White_Space is the separators and six control characters.
    case UTF8PROC_CATEGORY_ZS:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP: flags = kSpace; break;
    default: break;
  }
  if ((c >= '\t' && c <= '\r') || c == 0x85) flags |= kSpace;
  if (c == '\r' || c == '\n') flags |= kNewline;
  if ((c >= 0x4E00 && c <= 0x9FA5) || (c >= 0x3040 && c <= 0x30FF)) flags |= kCjk;
  if ((c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z')) flags |= kAsciiLetter;
  return flags;
}

}  // namespace

CharTable::CharTable() {
  std::array<uint8_t, 256> page;
  for (uint32_t p = 0; p < page_of_.size(); ++p) {
    for (uint32_t i = 0; i < 256; ++i) page[i] = flags_of(p << 8 | i);
    size_t k = 0;
    while (k < pages_.size() && !std::equal(page.begin(), page.end(), pages_.begin() + static_cast<ptrdiff_t>(k))) k += 256;
    if (k == pages_.size()) pages_.insert(pages_.end(), page.begin(), page.end());
    page_of_[p] = static_cast<uint16_t>(k / 256);
  }
}

const CharTable& CharTable::get() {
  static const CharTable table;
  return table;
}

}  // namespace lockstep
