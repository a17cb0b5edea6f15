//! Structures that the verbs library and its caller share, as `infiniband/verbs.h` of rdma-core lays them out.
//!
//! They are a stable ABI on Linux. macOS ships a header of the same name and origin; that its layouts are the same has
//! not been checked on a Mac. The assertions at the end are the offsets that a C compiler gives for rdma-core's header on
//! a 64-bit machine, spelled out by hand; a target that lays structures out otherwise does not compile.

#![allow(dead_code, reason = "fields that only the library reads have to be there all the same")]

use std::ffi::{c_int, c_void};

/// A function of the context's table that is not called from here.
type Unused = *const c_void;

/// A device in the library's list.
#[repr(C)]
pub(super) struct RawDevice {
    _opaque: [u8; 0],
}

/// A protection domain.
#[repr(C)]
pub(super) struct RawPd {
    _opaque: [u8; 0],
}

/// An open device. The calls of the fast path are in its table and are no symbols of the library.
#[repr(C)]
pub(super) struct RawContext {
    device: *mut RawDevice,
    pub(super) ops: RawOps,
    cmd_fd: c_int,
    pub(super) async_fd: c_int,
    num_comp_vectors: c_int,
}

#[repr(C)]
pub(super) struct RawOps {
    before_poll: [Unused; 11],
    pub(super) poll_cq: unsafe extern "C" fn(*mut RawCq, c_int, *mut RawWc) -> c_int,
    pub(super) req_notify_cq: unsafe extern "C" fn(*mut RawCq, c_int) -> c_int,
    between: [Unused; 12],
    pub(super) post_send: unsafe extern "C" fn(*mut RawQp, *mut RawSendWr, *mut *mut RawSendWr) -> c_int,
    pub(super) post_recv: unsafe extern "C" fn(*mut RawQp, *mut RawRecvWr, *mut *mut RawRecvWr) -> c_int,
    after: [Unused; 5],
}

/// The channel on which a completion queue says that it is no longer empty.
#[repr(C)]
pub(super) struct RawChannel {
    context: *mut RawContext,
    pub(super) fd: c_int,
}

/// The beginning of a completion queue.
#[repr(C)]
pub(super) struct RawCq {
    pub(super) context: *mut RawContext,
    channel: *mut RawChannel,
}

/// The beginning of a queue pair.
#[repr(C)]
pub(super) struct RawQp {
    pub(super) context: *mut RawContext,
    pointers: [*mut c_void; 5],
    handle: u32,
    pub(super) qp_num: u32,
}

/// A registration.
#[repr(C)]
pub(super) struct RawMr {
    context: *mut RawContext,
    pd: *mut RawPd,
    addr: *mut c_void,
    length: usize,
    handle: u32,
    pub(super) lkey: u32,
    pub(super) rkey: u32,
}

/// A piece of registered memory.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct RawSge {
    pub(super) addr: u64,
    pub(super) length: u32,
    pub(super) lkey: u32,
}

/// Where a one-sided operation goes: the arm `rdma` of a send request's union.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct RawRemote {
    pub(super) remote_addr: u64,
    pub(super) rkey: u32,
    unused: u32,
}

impl RawRemote {
    pub(super) fn new(remote_addr: u64, rkey: u32) -> Self {
        Self { remote_addr, rkey, unused: 0 }
    }
}

#[repr(C)]
pub(super) struct RawSendWr {
    pub(super) wr_id: u64,
    pub(super) next: *mut RawSendWr,
    pub(super) sg_list: *mut RawSge,
    pub(super) num_sge: c_int,
    pub(super) opcode: u32,
    pub(super) send_flags: u32,
    pub(super) imm_data: u32,
    /// SEND has none.
    pub(super) remote: RawRemote,
    /// The rest of the union, and what only other kinds of queue pairs have.
    pub(super) rest: [u64; 9],
}

#[repr(C)]
pub(super) struct RawRecvWr {
    pub(super) wr_id: u64,
    pub(super) next: *mut RawRecvWr,
    pub(super) sg_list: *mut RawSge,
    pub(super) num_sge: c_int,
}

/// A completion.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct RawWc {
    pub(super) wr_id: u64,
    pub(super) status: u32,
    pub(super) opcode: u32,
    pub(super) vendor_err: u32,
    pub(super) byte_len: u32,
    imm_data: u32,
    qp_num: u32,
    src_qp: u32,
    wc_flags: u32,
    pkey_index: u16,
    slid: u16,
    sl: u8,
    dlid_path_bits: u8,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct RawQpCap {
    pub(super) max_send_wr: u32,
    pub(super) max_recv_wr: u32,
    pub(super) max_send_sge: u32,
    pub(super) max_recv_sge: u32,
    pub(super) max_inline_data: u32,
}

#[repr(C)]
pub(super) struct RawQpInit {
    pub(super) qp_context: *mut c_void,
    pub(super) send_cq: *mut RawCq,
    pub(super) recv_cq: *mut RawCq,
    pub(super) srq: *mut c_void,
    pub(super) cap: RawQpCap,
    pub(super) qp_type: u32,
    pub(super) sq_sig_all: c_int,
}

/// A route to a peer's port, with the global part that RoCE goes by in front.
#[repr(C, align(8))]
#[derive(Clone, Copy, Default)]
pub(super) struct RawAh {
    pub(super) dgid: [u8; 16],
    pub(super) flow_label: u32,
    pub(super) sgid_index: u8,
    pub(super) hop_limit: u8,
    pub(super) traffic_class: u8,
    pub(super) dlid: u16,
    pub(super) sl: u8,
    pub(super) src_path_bits: u8,
    pub(super) static_rate: u8,
    pub(super) is_global: u8,
    pub(super) port_num: u8,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct RawQpAttr {
    pub(super) qp_state: u32,
    pub(super) cur_qp_state: u32,
    pub(super) path_mtu: u32,
    pub(super) path_mig_state: u32,
    pub(super) qkey: u32,
    pub(super) rq_psn: u32,
    pub(super) sq_psn: u32,
    pub(super) dest_qp_num: u32,
    pub(super) qp_access_flags: u32,
    pub(super) cap: RawQpCap,
    pub(super) ah: RawAh,
    pub(super) alt_ah: RawAh,
    pub(super) pkey_index: u16,
    pub(super) alt_pkey_index: u16,
    pub(super) en_sqd_async_notify: u8,
    pub(super) sq_draining: u8,
    pub(super) max_rd_atomic: u8,
    pub(super) max_dest_rd_atomic: u8,
    pub(super) min_rnr_timer: u8,
    pub(super) port_num: u8,
    pub(super) timeout: u8,
    pub(super) retry_cnt: u8,
    pub(super) rnr_retry: u8,
    pub(super) alt_port_num: u8,
    pub(super) alt_timeout: u8,
    pub(super) rate_limit: u32,
}

/// What a port says of itself: the part that every version has, and room for what others add.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct RawPort {
    pub(super) state: u32,
    max_mtu: u32,
    pub(super) active_mtu: u32,
    pub(super) gid_tbl_len: c_int,
    rest: [u32; 28],
}

/// An entry of the table of addresses, as `_ibv_query_gid_ex` gives it.
#[repr(C, align(8))]
#[derive(Clone, Copy, Default)]
pub(super) struct RawGidEntry {
    pub(super) gid: [u8; 16],
    gid_index: u32,
    port_num: u32,
    pub(super) gid_type: u32,
    ndev_ifindex: u32,
}

pub(super) const QPT_RC: u32 = 2;
pub(super) const QPT_UC: u32 = 3;
pub(super) const QPS_INIT: u32 = 1;
pub(super) const QPS_RTR: u32 = 2;
pub(super) const QPS_RTS: u32 = 3;
pub(super) const WR_RDMA_WRITE: u32 = 0;
pub(super) const WR_SEND: u32 = 2;
pub(super) const WR_RDMA_READ: u32 = 4;
pub(super) const SEND_SIGNALED: u32 = 2;
pub(super) const SEND_INLINE: u32 = 8;
pub(super) const WC_RECV: u32 = 128;
pub(super) const PORT_ACTIVE: u32 = 4;
pub(super) const GID_TYPE_ROCE_V2: u32 = 2;

/// Bits of `ibv_modify_qp`'s mask.
pub(super) mod mask {
    pub(in super::super) const STATE: i32 = 1;
    pub(in super::super) const ACCESS_FLAGS: i32 = 8;
    pub(in super::super) const PKEY_INDEX: i32 = 16;
    pub(in super::super) const PORT: i32 = 32;
    pub(in super::super) const AV: i32 = 128;
    pub(in super::super) const PATH_MTU: i32 = 256;
    pub(in super::super) const TIMEOUT: i32 = 512;
    pub(in super::super) const RETRY_CNT: i32 = 1024;
    pub(in super::super) const RNR_RETRY: i32 = 2048;
    pub(in super::super) const RQ_PSN: i32 = 4096;
    pub(in super::super) const MAX_QP_RD_ATOMIC: i32 = 8192;
    pub(in super::super) const MIN_RNR_TIMER: i32 = 32768;
    pub(in super::super) const SQ_PSN: i32 = 65536;
    pub(in super::super) const MAX_DEST_RD_ATOMIC: i32 = 131_072;
    pub(in super::super) const CAP: i32 = 524_288;
    pub(in super::super) const DEST_QPN: i32 = 1_048_576;
}

const _: () = {
    use std::mem::{align_of, offset_of as at, size_of};
    assert!(size_of::<RawOps>() == 256 && at!(RawOps, poll_cq) == 88 && at!(RawOps, req_notify_cq) == 96);
    assert!(at!(RawOps, post_send) == 200 && at!(RawOps, post_recv) == 208);
    assert!(at!(RawContext, ops) == 8 && at!(RawContext, cmd_fd) == 264 && at!(RawContext, async_fd) == 268);
    assert!(at!(RawContext, num_comp_vectors) == 272);
    assert!(at!(RawQp, context) == 0 && at!(RawQp, qp_num) == 52);
    assert!(at!(RawCq, context) == 0 && at!(RawCq, channel) == 8 && at!(RawChannel, fd) == 8);
    assert!(at!(RawMr, addr) == 16 && at!(RawMr, length) == 24 && at!(RawMr, lkey) == 36 && at!(RawMr, rkey) == 40);
    assert!(size_of::<RawSge>() == 16 && at!(RawSge, length) == 8 && at!(RawSge, lkey) == 12);
    assert!(size_of::<RawSendWr>() == 128 && at!(RawSendWr, sg_list) == 16 && at!(RawSendWr, num_sge) == 24);
    assert!(at!(RawSendWr, opcode) == 28 && at!(RawSendWr, send_flags) == 32 && at!(RawSendWr, imm_data) == 36);
    assert!(at!(RawSendWr, remote) == 40 && at!(RawSendWr, rest) == 56);
    assert!(size_of::<RawRemote>() == 16 && at!(RawRemote, remote_addr) == 0 && at!(RawRemote, rkey) == 8);
    assert!(size_of::<RawRecvWr>() == 32 && at!(RawRecvWr, sg_list) == 16 && at!(RawRecvWr, num_sge) == 24);
    assert!(size_of::<RawWc>() == 48 && at!(RawWc, status) == 8 && at!(RawWc, opcode) == 12 && at!(RawWc, byte_len) == 20);
    assert!(at!(RawWc, qp_num) == 28 && at!(RawWc, wc_flags) == 36);
    assert!(size_of::<RawQpCap>() == 20 && at!(RawQpCap, max_inline_data) == 16);
    assert!(size_of::<RawQpInit>() == 64 && at!(RawQpInit, send_cq) == 8 && at!(RawQpInit, cap) == 32);
    assert!(at!(RawQpInit, qp_type) == 52 && at!(RawQpInit, sq_sig_all) == 56);
    assert!(size_of::<RawAh>() == 32 && align_of::<RawAh>() == 8 && at!(RawAh, sgid_index) == 20 && at!(RawAh, hop_limit) == 21);
    assert!(at!(RawAh, dlid) == 24 && at!(RawAh, is_global) == 29 && at!(RawAh, port_num) == 30);
    assert!(size_of::<RawQpAttr>() == 144 && at!(RawQpAttr, path_mtu) == 8 && at!(RawQpAttr, rq_psn) == 20);
    assert!(at!(RawQpAttr, sq_psn) == 24 && at!(RawQpAttr, dest_qp_num) == 28 && at!(RawQpAttr, qp_access_flags) == 32);
    assert!(at!(RawQpAttr, cap) == 36 && at!(RawQpAttr, ah) == 56 && at!(RawQpAttr, pkey_index) == 120);
    assert!(at!(RawQpAttr, max_rd_atomic) == 126 && at!(RawQpAttr, max_dest_rd_atomic) == 127);
    assert!(at!(RawQpAttr, min_rnr_timer) == 128 && at!(RawQpAttr, port_num) == 129 && at!(RawQpAttr, timeout) == 130);
    assert!(at!(RawQpAttr, retry_cnt) == 131 && at!(RawQpAttr, rnr_retry) == 132);
    // rdma-core's is 52 bytes long; a library that writes more than this would have to have grown by two and a half times.
    assert!(size_of::<RawPort>() == 128 && at!(RawPort, active_mtu) == 8 && at!(RawPort, gid_tbl_len) == 12);
    assert!(size_of::<RawGidEntry>() == 32 && align_of::<RawGidEntry>() == 8 && at!(RawGidEntry, gid_type) == 24);
};
