/* hixl.h: ge::AscendString and hixl::Hixl as the simulator declares them: names, sizes, order of fields. Our own text.
 *
 * What is mangled into a symbol's name is what a caller of the vendor's library links to, so names of namespaces, types
 * and their order are the vendor's; nothing is inline that the vendor has out of line. */
#ifndef KVXSIM_HIXL_H
#define KVXSIM_HIXL_H

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#define KVXSIM_VISIBLE __attribute__((visibility("default")))

namespace ge {

class KVXSIM_VISIBLE AscendString {
  public:
    AscendString() = default;
    AscendString(const char *text);
    AscendString(const char *text, size_t length);
    const char *GetString() const;
    size_t GetLength() const;
    bool operator<(const AscendString &other) const;
    bool operator>(const AscendString &other) const;
    bool operator<=(const AscendString &other) const;
    bool operator>=(const AscendString &other) const;
    bool operator==(const AscendString &other) const;
    bool operator!=(const AscendString &other) const;

  private:
    std::shared_ptr<std::string> name_;
};

} // namespace ge

namespace hixl {

using Status = uint32_t;
using MemHandle = void *;
using TransferReq = void *;
using S = ge::AscendString;

enum MemType { MEM_DEVICE = 0, MEM_HOST = 1 };
enum TransferOp { READ = 0, WRITE = 1 };
enum class TransferStatus { WAITING = 0, COMPLETED = 1, TIMEOUT = 2, FAILED = 3 };
enum class AsyncConnectStatus {
    NOT_CONNECT = 0,
    CONNECT_PENDING = 1,
    CONNECTING = 2,
    CONNECTED = 3,
    CONNECT_FAILED = 4,
    DISCONNECT_PENDING = 5,
    DISCONNECTING = 6
};
enum FeatureType : int32_t { AUTO_CONNECT = 0, CLIENT_SERVER_COMM = 1 };

struct MemDesc {
    uintptr_t addr;
    size_t len;
    uint8_t reserved[128];
};

struct TransferOpDesc {
    uintptr_t local_addr;
    uintptr_t remote_addr;
    size_t len;
};

struct TransferArgs {
    const void *user_data; /* read by 9.1 and later only */
    uint8_t reserved[120];
};

struct GetTransferStatusArgs {
    uint32_t max_query_count;
    bool skip_waiting;
    uint8_t reserved[123];
};

struct TransferResult {
    TransferReq req;
    const void *user_data;
    TransferStatus status;
    uint8_t reserved[108];
};

struct NotifyDesc {
    S name;
    S notify_msg;
};

static_assert(sizeof(ge::AscendString) == 16, "AscendString");
static_assert(sizeof(MemDesc) == 144, "MemDesc");
static_assert(sizeof(TransferOpDesc) == 24, "TransferOpDesc");
static_assert(sizeof(TransferArgs) == 128, "TransferArgs");
static_assert(sizeof(GetTransferStatusArgs) == 128, "GetTransferStatusArgs");
static_assert(sizeof(TransferResult) == 128, "TransferResult");
static_assert(sizeof(NotifyDesc) == 32, "NotifyDesc");
static_assert(sizeof(std::map<S, S>) == 48 && sizeof(std::vector<NotifyDesc>) == 24, "libstdc++");

class KVXSIM_VISIBLE Hixl {
  public:
    Hixl();
    ~Hixl();
    Status Initialize(const S &local_engine, const std::map<S, S> &options);
    void Finalize();
    Status RegisterMem(const MemDesc &mem, MemType type, MemHandle &mem_handle);
    Status DeregisterMem(MemHandle mem_handle);
    Status Connect(const S &remote_engine, int32_t timeout_ms = 1000);
    Status Disconnect(const S &remote_engine, int32_t timeout_ms = 1000);
    Status TransferSync(const S &remote_engine, TransferOp operation, const std::vector<TransferOpDesc> &descs,
                        int32_t timeout_ms = 1000);
    Status TransferAsync(const S &remote_engine, TransferOp operation, const std::vector<TransferOpDesc> &descs,
                         const TransferArgs &args, TransferReq &req);
    Status GetTransferStatus(const TransferReq &req, TransferStatus &status);
    Status SendNotify(const S &remote_engine, const NotifyDesc &notify, int32_t timeout_ms = 1000);
    Status GetNotifies(std::vector<NotifyDesc> &notifies);
    /* 9.1 and later */
    Status ConnectAsync(const S &remote_engine, int32_t timeout_ms = 1000);
    Status DisconnectAsync(const S &remote_engine, int32_t timeout_ms = 1000);
    Status GetAsyncConnectStatus(const S &remote_engine, AsyncConnectStatus &status);
    Status GetAsyncConnectStatus(std::map<S, AsyncConnectStatus> &statuses);
    Status GetTransferStatus(const GetTransferStatusArgs &args, std::vector<TransferResult> &results);
    static Status GetCapability(FeatureType feature, int32_t &value);

  private:
    class Impl;
    std::unique_ptr<Impl> impl_;
};

static_assert(sizeof(Hixl) == 8, "Hixl");

} // namespace hixl

#endif
