/* hixl.cc: libcann_hixl.so's public face: hixl::Hixl, every member out of line. */
#include "engine.h"
#include "hixl.h"

namespace hixl {

class Hixl::Impl {
  public:
    kvxsim::Engine engine;
};

namespace {

std::string text(const S &string) {
    return std::string(string.GetString(), string.GetLength());
}

} // namespace

Hixl::Hixl() : impl_(new Impl) {
}

Hixl::~Hixl() {
    Finalize();
}

Status Hixl::Initialize(const S &local_engine, const std::map<S, S> &options) {
    kvxsim::Call call(&impl_->engine);
    std::map<std::string, std::string> plain;
    for (const auto &[key, value] : options) {
        /* Looked up as the vendor does, with the library's order: a caller whose map is ordered otherwise is caught. */
        if (options.find(key) == options.end())
            return kvxsim_error(kvxsim::kParamInvalid, "Initialize: the options' map is in another order");
        plain[text(key)] = text(value);
    }
    return impl_->engine.initialize(text(local_engine), plain);
}

void Hixl::Finalize() {
    impl_->engine.finalize();
}

Status Hixl::RegisterMem(const MemDesc &mem, MemType type, MemHandle &mem_handle) {
    kvxsim::Call call(&impl_->engine);
    return impl_->engine.register_memory(mem.addr, mem.len, type, &mem_handle);
}

Status Hixl::DeregisterMem(MemHandle mem_handle) {
    kvxsim::Call call(&impl_->engine);
    return impl_->engine.deregister(mem_handle);
}

Status Hixl::Connect(const S &remote_engine, int32_t timeout_ms) {
    kvxsim::Call call(&impl_->engine);
    return impl_->engine.connect(text(remote_engine), timeout_ms);
}

Status Hixl::Disconnect(const S &remote_engine, int32_t timeout_ms) {
    kvxsim::Call call(&impl_->engine);
    return impl_->engine.disconnect(text(remote_engine), timeout_ms);
}

Status Hixl::TransferSync(const S &remote_engine, TransferOp operation, const std::vector<TransferOpDesc> &descs,
                          int32_t timeout_ms) {
    kvxsim::Call call(&impl_->engine);
    return impl_->engine.transfer_sync(text(remote_engine), operation == WRITE, descs, timeout_ms);
}

Status Hixl::TransferAsync(const S &remote_engine, TransferOp operation, const std::vector<TransferOpDesc> &descs,
                           const TransferArgs &args, TransferReq &req) {
    kvxsim::Call call(&impl_->engine);
    return impl_->engine.transfer_async(text(remote_engine), operation == WRITE, descs, args.user_data, &req);
}

Status Hixl::GetTransferStatus(const TransferReq &req, TransferStatus &status) {
    kvxsim::Call call(&impl_->engine);
    return impl_->engine.poll(req, &status);
}

Status Hixl::SendNotify(const S &remote_engine, const NotifyDesc &notify, int32_t timeout_ms) {
    kvxsim::Call call(&impl_->engine);
    return impl_->engine.send_notify(text(remote_engine), text(notify.name), text(notify.notify_msg), timeout_ms);
}

Status Hixl::GetNotifies(std::vector<NotifyDesc> &notifies) {
    kvxsim::Call call(&impl_->engine);
    for (const auto &[name, message] : impl_->engine.take_notifies()) {
        NotifyDesc notify;
        notify.name = S(name.c_str(), name.size());
        notify.notify_msg = S(message.c_str(), message.size());
        notifies.push_back(notify);
    }
    return 0;
}

/* -- 9.1 and later: the linker leaves these out for older toolkits -- */

Status Hixl::ConnectAsync(const S &remote_engine, int32_t timeout_ms) {
    kvxsim::Call call(&impl_->engine);
    return impl_->engine.connect_async(text(remote_engine), timeout_ms, true);
}

Status Hixl::DisconnectAsync(const S &remote_engine, int32_t timeout_ms) {
    kvxsim::Call call(&impl_->engine);
    return impl_->engine.connect_async(text(remote_engine), timeout_ms, false);
}

Status Hixl::GetAsyncConnectStatus(const S &remote_engine, AsyncConnectStatus &status) {
    status = impl_->engine.async_status(text(remote_engine));
    return 0;
}

Status Hixl::GetAsyncConnectStatus(std::map<S, AsyncConnectStatus> &statuses) {
    for (const auto &[remote, status] : impl_->engine.async_statuses())
        statuses[S(remote.c_str(), remote.size())] = status;
    return 0;
}

/* Of the communicator engine, which is the one that is imitated. */
Status Hixl::GetTransferStatus(const GetTransferStatusArgs &, std::vector<TransferResult> &) {
    return kvxsim_error(kvxsim::kUnsupported, "GetTransferStatus of many: not with a communicator engine");
}

Status Hixl::GetCapability(FeatureType feature, int32_t &value) {
    if (feature != AUTO_CONNECT && feature != CLIENT_SERVER_COMM)
        return kvxsim_error(kvxsim::kParamInvalid, "GetCapability: unknown feature %d", static_cast<int>(feature));
    value = feature == AUTO_CONNECT ? 1 : 0;
    return 0;
}

} // namespace hixl

/* One name of the C interface, which came with 9.0: that it is there tells the toolkit. Its layouts changed in 9.1
 * under the same names, so nobody may call it. */
extern "C" KVXSIM_VISIBLE uint32_t HixlCSServerCreate(const void *, const void *, void **) {
    kvxsim_fault("HixlCSServerCreate was called");
    return kvxsim::kUnsupported;
}
