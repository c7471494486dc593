/* metadef.cc: libmetadef.so of the simulator: ge::AscendString, a shared pointer to a string and nothing else. */
#include "hixl.h"

namespace ge {

namespace {

const std::string &text_of(const std::shared_ptr<std::string> &name) {
    static const std::string *empty = new std::string;
    return name ? *name : *empty;
}

} // namespace

AscendString::AscendString(const char *text) {
    if (text)
        name_ = std::make_shared<std::string>(text);
}

AscendString::AscendString(const char *text, size_t length) {
    if (text)
        name_ = std::make_shared<std::string>(text, length);
}

const char *AscendString::GetString() const {
    return text_of(name_).c_str();
}

size_t AscendString::GetLength() const {
    return text_of(name_).size();
}

bool AscendString::operator<(const AscendString &other) const {
    return text_of(name_) < text_of(other.name_);
}

bool AscendString::operator>(const AscendString &other) const {
    return other < *this;
}

bool AscendString::operator<=(const AscendString &other) const {
    return !(other < *this);
}

bool AscendString::operator>=(const AscendString &other) const {
    return !(*this < other);
}

bool AscendString::operator==(const AscendString &other) const {
    return text_of(name_) == text_of(other.name_);
}

bool AscendString::operator!=(const AscendString &other) const {
    return !(*this == other);
}

} // namespace ge
