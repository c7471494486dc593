/* settings.cc: KVXFER_SIM_* from the environment and from control files, the counting of faults, the log.
 *
 * A control file (`control` for everyone, `control.<pid>` for one process) is read again when it changes, so a test can
 * start or end a fault while a transfer runs. A line of it beats the environment; an empty value switches a fault off.
 */
#include <cerrno>
#include <cinttypes>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fcntl.h>
#include <fstream>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <sys/stat.h>
#include <unistd.h>

#include "sim.h"

namespace {

constexpr uint64_t kLookNs = 1000000; /* a control file is looked at once a millisecond at most */

struct ControlFile {
    std::string path;
    uint64_t inode = 0, size = 0, changed_ns = 0;
    std::map<std::string, std::string> values;

    /* True when what it says is different now. */
    bool refresh() {
        struct stat now;
        uint64_t inode_now = 0, size_now = 0, changed_now = 0;
        if (stat(path.c_str(), &now) == 0) {
            inode_now = now.st_ino;
            size_now = static_cast<uint64_t>(now.st_size);
            changed_now =
                static_cast<uint64_t>(now.st_mtim.tv_sec) * 1000000000u + static_cast<uint64_t>(now.st_mtim.tv_nsec);
        }
        if (inode_now == inode && size_now == size && changed_now == changed_ns)
            return false;
        inode = inode_now;
        size = size_now;
        changed_ns = changed_now;
        values.clear();
        std::ifstream file(path);
        for (std::string line; std::getline(file, line);) {
            size_t sign = line.find('=');
            if (!line.empty() && line[0] != '#' && sign != std::string::npos)
                values[line.substr(0, sign)] = line.substr(sign + 1);
        }
        return true;
    }
};

struct Settings {
    std::mutex lock;
    uint64_t looked_ns = 0;
    ControlFile all, mine;
    std::map<std::string, uint64_t> counts;         /* of calls per operation and of transfers per fault */
    std::map<std::string, std::string> counted_for; /* the setting the count belongs to: a new one starts at 0 */

    Settings() {
        all.path = std::string(kvxsim_directory()) + "/control";
        mine.path = all.path + "." + std::to_string(getpid());
    }

    std::string get(const char *name) {
        std::string key = std::string("KVXFER_SIM_") + name;
        uint64_t now = kvxsim_now_ns();
        if (looked_ns == 0 || now - looked_ns >= kLookNs) {
            looked_ns = now;
            all.refresh();
            mine.refresh();
        }
        for (ControlFile *file : {&mine, &all}) {
            auto found = file->values.find(key);
            if (found != file->values.end())
                return found->second;
        }
        const char *value = std::getenv(key.c_str());
        return value ? value : "";
    }

    uint64_t count(const std::string &counter, const std::string &setting) {
        if (counted_for[counter] != setting) {
            counted_for[counter] = setting;
            counts[counter] = 0;
        }
        return ++counts[counter];
    }
};

Settings &settings() {
    static Settings *one = new Settings; /* never destroyed: threads may outlive main */
    return *one;
}

/* "3": the third; "3+": from the third on; "*": each. */
bool nth_matches(const std::string &nth, uint64_t count) {
    if (nth == "*")
        return true;
    char *end = nullptr;
    uint64_t wanted = std::strtoull(nth.c_str(), &end, 10);
    return wanted != 0 && (count == wanted || (*end == '+' && count > wanted));
}

void write_line(const char *level, const char *format, va_list arguments) {
    char text[KVXSIM_TEXT_MAX], line[KVXSIM_TEXT_MAX + 96];
    vsnprintf(text, sizeof text, format, arguments);
    int length = snprintf(line, sizeof line, "%s pid %d at %" PRIu64 ": " KVXSIM_NAME ": %s\n", level, getpid(),
                          kvxsim_now_ns() / 1000, text);
    std::string path = std::string(kvxsim_directory()) + "/sim.log";
    int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (fd >= 0) {
        ssize_t written = write(fd, line, static_cast<size_t>(length)); /* one write: lines of processes never mix */
        (void)written;
        close(fd);
    }
}

} // namespace

uint64_t kvxsim_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<uint64_t>(now.tv_sec) * 1000000000u + static_cast<uint64_t>(now.tv_nsec);
}

void kvxsim_sleep_until(uint64_t ns) {
    struct timespec until = {static_cast<time_t>(ns / 1000000000u), static_cast<long>(ns % 1000000000u)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, nullptr) == EINTR)
        continue;
}

void kvxsim_setting(const char *name, char *out, size_t size) {
    std::lock_guard<std::mutex> guard(settings().lock);
    snprintf(out, size, "%s", settings().get(name).c_str());
}

double kvxsim_number(const char *name, double otherwise) {
    char text[64];
    kvxsim_setting(name, text, sizeof text);
    return text[0] ? std::strtod(text, nullptr) : otherwise;
}

bool kvxsim_is(const char *name, const char *value) {
    std::lock_guard<std::mutex> guard(settings().lock);
    std::istringstream words(settings().get(name));
    for (std::string word; std::getline(words, word, ',');)
        if (word == value)
            return true;
    return false;
}

bool kvxsim_fails(const char *operation, uint32_t *status_p) {
    std::lock_guard<std::mutex> guard(settings().lock);
    std::string setting = settings().get("FAIL");
    if (setting.empty())
        return false;
    uint64_t count = settings().count(std::string("fail ") + operation, setting);
    std::istringstream rules(setting);
    for (std::string rule; std::getline(rules, rule, ',');) {
        std::istringstream parts(rule);
        std::string name, nth, status;
        if (std::getline(parts, name, ':') && std::getline(parts, nth, ':') && std::getline(parts, status) &&
            name == operation && nth_matches(nth, count)) {
            *status_p = static_cast<uint32_t>(std::strtoul(status.c_str(), nullptr, 10));
            return true;
        }
    }
    return false;
}

bool kvxsim_strikes(const char *name) {
    std::lock_guard<std::mutex> guard(settings().lock);
    std::string setting = settings().get(name);
    return !setting.empty() && nth_matches(setting, settings().count(name, setting));
}

bool kvxsim_lost(int card) {
    char text[16];
    snprintf(text, sizeof text, "%d", card);
    return kvxsim_is("DEVICE_LOST", text);
}

void kvxsim_hang(const char *operation) {
    if (!kvxsim_is("HANG", operation))
        return;
    kvxsim_note("%s hangs until KVXFER_SIM_HANG is taken away", operation);
    while (kvxsim_is("HANG", operation))
        kvxsim_sleep_until(kvxsim_now_ns() + 5000000);
}

void kvxsim_note(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    write_line("NOTE", format, arguments);
    va_end(arguments);
}

void kvxsim_fault(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    write_line("FAULT", format, arguments);
    va_end(arguments);
    if (kvxsim_is("STRICT", "abort")) {
        va_start(arguments, format);
        fprintf(stderr, KVXSIM_NAME " (simulated), KVXFER_SIM_STRICT=abort: ");
        vfprintf(stderr, format, arguments);
        fputc('\n', stderr);
        va_end(arguments);
        abort();
    }
}
