//! Devices of the machine, through its verbs library.
//!
//! The library is opened at run time, so a machine without it loses nothing. What the fast path calls (`ibv_post_send`,
//! `ibv_post_recv`, `ibv_poll_cq`, `ibv_req_notify_cq`) are inline functions of the C header that go through a table in the device's
//! context; they are done so here, on structures laid out as the header has them.
//!
//! | module | what |
//! |---|---|
//! | `layout` | the structures, with the header's offsets asserted |
//! | `library` | finding and binding the library |
//! | `objects` | owners of the library's objects, in the order in which they may be destroyed |

mod layout;
mod library;
mod objects;

use std::fmt;
use std::os::fd::BorrowedFd;
use std::ptr::null_mut;
use std::sync::Arc;

use layout::{
    GID_TYPE_ROCE_V2, PORT_ACTIVE, QPS_INIT, QPS_RTR, QPS_RTS, RawAh, RawQpAttr, RawQpCap, RawRecvWr, RawRemote, RawSendWr, RawSge, RawWc,
    SEND_INLINE, SEND_SIGNALED, WC_RECV, WR_RDMA_READ, WR_RDMA_WRITE, WR_SEND, mask,
};
use library::Verbs;
use objects::{Context, Cq, Mr, Pd, Qp};

use super::device::{
    Ask, Device, Devices, Done, Gid, Granted, InUse, Init, NoDevices, Pair, Port, ReadyToReceive, ReadyToSend, Spot, VerbsError, Way,
    access,
};
use crate::region::{LentPages, Slot};

/// Ports of an adapter that are looked for.
const PORTS_MAX: u8 = 2;

/// Entries of a port's table of addresses that are looked at.
const GIDS_MAX: u8 = 128;

/// Completions taken at a time.
const POLLED: usize = 16;

/// The machine's devices.
///
/// # Errors
/// [`NoDevices`], which is no fault of anybody's.
pub(super) fn devices() -> Result<Devices, NoDevices> {
    let verbs = Arc::new(Verbs::load()?);
    let mut count = 0;
    // SAFETY: the count is there to be written.
    let list = unsafe { (verbs.get_device_list)(&raw mut count) };
    if list.is_null() {
        return Err(NoDevices::Nothing { reason: std::io::Error::last_os_error().to_string() });
    }
    let mut devices: Devices = Vec::new();
    let mut reason = "it lists no device".to_owned();
    for i in 0..usize::try_from(count).unwrap_or(0) {
        // SAFETY: the list has that many entries and has not been freed.
        match unsafe { Context::open(&verbs, *list.add(i)) }.and_then(|context| Pd::new(&context)) {
            Ok(pd) => devices.extend(ports(&pd)),
            Err(error) => {
                tracing::info!(%error, "a verbs device cannot be used");
                reason = error.to_string();
            }
        }
    }
    // SAFETY: the list came from the library and is not used any more; open devices are not touched by this.
    unsafe { (verbs.free_device_list)(list) };
    if devices.is_empty() { Err(NoDevices::Nothing { reason }) } else { Ok(devices) }
}

fn ports(pd: &Arc<Pd>) -> Devices {
    let there = (1..=PORTS_MAX).take_while(|port| pd.context.port(*port).is_ok());
    there
        .map(|port| Arc::new(FfiDevice { name: format!("{}/{port}", pd.context.name), port, pd: Arc::clone(pd) }) as Arc<dyn Device>)
        .collect()
}

struct FfiDevice {
    name: String,
    port: u8,
    pd: Arc<Pd>,
}

impl fmt::Debug for FfiDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FfiDevice({})", self.name)
    }
}

impl Device for FfiDevice {
    fn name(&self) -> &str {
        &self.name
    }

    fn port(&self) -> Result<Port, VerbsError> {
        let context = &self.pd.context;
        let raw = context.port(self.port)?;
        let entries = u8::try_from(raw.gid_tbl_len.max(0)).unwrap_or(u8::MAX).min(GIDS_MAX);
        let mut gids: Vec<(bool, u8, Gid)> = (0..entries)
            .filter_map(|index| context.gid(self.port, index).map(|(gid, kind)| (kind != Some(GID_TYPE_ROCE_V2), index, Gid(gid))))
            .filter(|(_, _, gid)| gid.0 != [0; 16])
            .collect();
        // An address stands in the table once for each version of RoCE; the routable one is what adapters agree on.
        gids.sort_unstable();
        Ok(Port {
            number: self.port,
            active: raw.state == PORT_ACTIVE,
            mtu: u8::try_from(raw.active_mtu).unwrap_or(0),
            gids: gids.into_iter().map(|(_, index, gid)| (index, gid)).collect(),
        })
    }

    fn create(&self, ask: &Ask) -> Result<Box<dyn Pair>, VerbsError> {
        let cq = Cq::new(&self.pd.context, ask.completions)?;
        let cap = RawQpCap {
            max_send_wr: ask.send_depth,
            max_recv_wr: ask.receive_depth,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: ask.inline_bytes,
        };
        let pd = if ask.alone { Pd::new(&self.pd.context)? } else { Arc::clone(&self.pd) };
        let (qp, granted) = Qp::new(&pd, cq, ask.profile, cap)?;
        Ok(Box::new(FfiPair { qp: Some(qp), mr: None, lent: None, pd, posted: Vec::new(), free: Vec::new(), granted }))
    }

    fn in_use(&self) -> InUse {
        self.pd.context.in_use()
    }
}

/// A queue pair, its registration, and the slots that the device may touch. Fields are dropped in this order, which matters.
struct FfiPair {
    qp: Option<Qp>,
    mr: Option<Mr>,
    /// What is registered, if it is lent memory.
    lent: Option<LentPages>,
    pd: Arc<Pd>,
    /// By the work request's number.
    posted: Vec<Option<Slot>>,
    free: Vec<usize>,
    granted: RawQpCap,
}

impl FfiPair {
    fn refused(&self, call: &'static str) -> VerbsError {
        // As the library says it of impossible requests.
        let code = rustix::io::Errno::INVAL.raw_os_error();
        VerbsError::Call { call, device: self.pd.context.name.clone(), code, hint: "" }
    }

    fn modify(&mut self, mut attributes: RawQpAttr, mask: i32) -> Result<(), VerbsError> {
        match &mut self.qp {
            Some(qp) => qp.modify(&mut attributes, mask),
            None => Err(self.refused("ibv_modify_qp")),
        }
    }

    /// Where the device finds the first bytes of a slot.
    fn piece(&self, call: &'static str, slot: &mut Slot, bytes: usize) -> Result<RawSge, VerbsError> {
        let start = slot.as_mut_slice().as_mut_ptr() as usize;
        let lkey = self.mr.as_ref().filter(|_| bytes <= slot.len()).and_then(|mr| mr.key_for(start, bytes));
        match (lkey, u32::try_from(bytes)) {
            (Some(lkey), Ok(length)) => Ok(RawSge { addr: start as u64, length, lkey }),
            _ => Err(self.refused(call)),
        }
    }

    /// Keeps a slot for the device and says under which number.
    fn keep(&mut self, slot: Slot) -> usize {
        match self.free.pop() {
            Some(at) => {
                self.posted[at] = Some(slot);
                at
            }
            None => {
                self.posted.push(Some(slot));
                self.posted.len() - 1
            }
        }
    }

    fn post(&mut self, opcode: u32, mut slot: Slot, bytes: usize, remote: RawRemote) -> Result<(), VerbsError> {
        const CALL: &str = "ibv_post_send";
        let mut piece = self.piece(CALL, &mut slot, bytes)?;
        let at = self.keep(slot);
        // What is read is written to the slot, which nothing can stand in for.
        let inline = if opcode != WR_RDMA_READ && piece.length <= self.granted.max_inline_data { SEND_INLINE } else { 0 };
        let mut request = RawSendWr {
            wr_id: at as u64,
            next: null_mut(),
            sg_list: &raw mut piece,
            num_sge: 1,
            opcode,
            send_flags: SEND_SIGNALED | inline,
            imm_data: 0,
            remote,
            rest: [0; 9],
        };
        let Some(qp) = &mut self.qp else { return Err(self.refused(CALL)) };
        // SAFETY: as in `post_receive`. The peer's memory is named by address and key only: what is there is the peer's to say.
        unsafe { qp.post_send(&mut request) }
    }

    fn release(&mut self, at: u64) -> Option<Slot> {
        let at = usize::try_from(at).ok()?;
        let slot = self.posted.get_mut(at)?.take()?;
        self.free.push(at);
        Some(slot)
    }
}

impl Pair for FfiPair {
    fn number(&self) -> u32 {
        self.qp.as_ref().map_or(0, Qp::number)
    }

    fn granted(&self) -> Granted {
        Granted { send_depth: self.granted.max_send_wr, receive_depth: self.granted.max_recv_wr }
    }

    fn register(&mut self, slots: &[Slot]) -> Result<(), VerbsError> {
        let ends = slots.iter().map(|slot| slot.as_slice().as_ptr_range());
        let start = ends.clone().map(|range| range.start as usize).min();
        let end = ends.map(|range| range.end as usize).max();
        let total: usize = slots.iter().map(Slot::len).sum();
        let (Some(start), Some(end), None) = (start, end, &self.mr) else { return Err(self.refused("ibv_reg_mr")) };
        // A hole between them would be memory that nobody gave.
        if end - start != total {
            return Err(self.refused("ibv_reg_mr"));
        }
        // SAFETY: the range is exactly that of the slots, which are one mapping that lives as long as any of them; pages that the device
        // knows stay in memory even after that. It is told of a slot only while `posted` owns it.
        self.mr = Some(unsafe { Mr::new(&self.pd, start as *mut _, total, access::LOCAL_WRITE) }?);
        Ok(())
    }

    fn init(&mut self, step: &Init) -> Result<(), VerbsError> {
        let attributes = RawQpAttr { qp_state: QPS_INIT, port_num: step.port, qp_access_flags: step.access, ..RawQpAttr::default() };
        self.modify(attributes, mask::STATE | mask::PKEY_INDEX | mask::PORT | mask::ACCESS_FLAGS)
    }

    fn ready_to_receive(&mut self, step: &ReadyToReceive) -> Result<(), VerbsError> {
        let ah = RawAh {
            dgid: step.peer.0,
            sgid_index: step.gid_index,
            hop_limit: step.hop_limit,
            is_global: 1,
            port_num: step.port,
            ..RawAh::default()
        };
        let mut attributes = RawQpAttr {
            qp_state: QPS_RTR,
            path_mtu: step.mtu.into(),
            dest_qp_num: step.peer_number,
            rq_psn: step.receive_psn,
            ah,
            ..RawQpAttr::default()
        };
        let mut bits = mask::STATE | mask::AV | mask::PATH_MTU | mask::DEST_QPN | mask::RQ_PSN;
        if let Some(reliable) = step.reliable {
            attributes.max_dest_rd_atomic = reliable.reads_max;
            attributes.min_rnr_timer = reliable.min_rnr_timer;
            bits |= mask::MAX_DEST_RD_ATOMIC | mask::MIN_RNR_TIMER;
        }
        self.modify(attributes, bits)
    }

    fn ready_to_send(&mut self, step: &ReadyToSend) -> Result<(), VerbsError> {
        let mut attributes = RawQpAttr { qp_state: QPS_RTS, sq_psn: step.send_psn, ..RawQpAttr::default() };
        let mut bits = mask::STATE | mask::SQ_PSN;
        if let Some(reliable) = step.reliable {
            attributes.timeout = reliable.timeout;
            attributes.retry_cnt = reliable.retries;
            attributes.rnr_retry = reliable.rnr_retries;
            attributes.max_rd_atomic = reliable.reads_max;
            bits |= mask::TIMEOUT | mask::RETRY_CNT | mask::RNR_RETRY | mask::MAX_QP_RD_ATOMIC;
        }
        self.modify(attributes, bits)
    }

    fn post_receive(&mut self, mut slot: Slot) -> Result<(), VerbsError> {
        const CALL: &str = "ibv_post_recv";
        let bytes = slot.len();
        let mut piece = self.piece(CALL, &mut slot, bytes)?;
        let at = self.keep(slot);
        let mut request = RawRecvWr { wr_id: at as u64, next: null_mut(), sg_list: &raw mut piece, num_sge: 1 };
        let Some(qp) = &mut self.qp else { return Err(self.refused(CALL)) };
        // SAFETY: the piece is registered (`piece`), and `posted` owns the slot until its completion or until the pair is dropped, where
        // the queue pair goes first.
        unsafe { qp.post_recv(&mut request) }
    }

    fn post_send(&mut self, slot: Slot, bytes: usize) -> Result<(), VerbsError> {
        self.post(WR_SEND, slot, bytes, RawRemote::default())
    }

    fn post_write(&mut self, slot: Slot, bytes: usize, to: Spot) -> Result<(), VerbsError> {
        self.post(WR_RDMA_WRITE, slot, bytes, RawRemote::new(to.address, to.key))
    }

    fn post_read(&mut self, slot: Slot, bytes: usize, from: Spot) -> Result<(), VerbsError> {
        self.post(WR_RDMA_READ, slot, bytes, RawRemote::new(from.address, from.key))
    }

    fn expose(&mut self, memory: &LentPages, bytes: usize, rights: u32) -> Result<u32, VerbsError> {
        if self.mr.is_some() || bytes == 0 || bytes > memory.len() {
            return Err(self.refused("ibv_reg_mr"));
        }
        let local = if rights & access::REMOTE_WRITE == 0 { 0 } else { access::LOCAL_WRITE };
        self.lent = Some(memory.clone());
        // SAFETY: the range lies inside of the mapping, which `lent` keeps until the registration is gone. It is lent memory: nobody has a
        // reference into it, it is only copied, and others may change it at any time.
        let mr = unsafe { Mr::new(&self.pd, memory.start().cast(), bytes, local | rights) }?;
        let key = mr.remote_key();
        self.mr = Some(mr);
        Ok(key)
    }

    fn destroy(&mut self) -> bool {
        // The queue pair first: only then does the device let go of the slots. Should it not be destroyed, taking the registration back
        // makes their memory unknown to the device, and they are freed after that.
        if let Some(qp) = self.qp.take() {
            self.qp = qp.destroy().err();
        }
        if self.mr.as_mut().is_none_or(Mr::destroy) {
            self.mr = None;
        }
        let gone = self.qp.is_none() && self.mr.is_none();
        if gone {
            self.lent = None;
        }
        gone
    }

    fn poll(&mut self, done: &mut Vec<Done>) -> Result<(), VerbsError> {
        let mut completions = [RawWc::default(); POLLED];
        loop {
            let Some(qp) = &mut self.qp else { return Err(self.refused("ibv_poll_cq")) };
            let count = qp.cq.poll(&mut completions)?.min(POLLED);
            for completion in &completions[..count] {
                // The number is one that was given out, or the library is not what it says.
                let Some(slot) = self.release(completion.wr_id) else { return Err(self.refused("ibv_poll_cq")) };
                // Where the status is not success, nothing else of a completion need be right; it ends the link anyway.
                let way = if completion.opcode & WC_RECV == 0 { Way::Sent } else { Way::Received };
                let bytes = (completion.byte_len as usize).min(slot.len());
                done.push(Done { way, slot, bytes, failed: (completion.status != 0).then_some(completion.status) });
            }
            if count < POLLED {
                return Ok(());
            }
        }
    }

    fn arm(&mut self) -> Result<(), VerbsError> {
        self.qp.as_mut().map_or(Ok(()), |qp| qp.cq.arm())
    }

    fn events(&self) -> Option<BorrowedFd<'_>> {
        self.qp.as_ref().and_then(|qp| qp.cq.events())
    }

    fn take_events(&mut self) {
        if let Some(qp) = &mut self.qp {
            qp.cq.take_events();
        }
    }
}

impl Drop for FfiPair {
    fn drop(&mut self) {
        if !self.destroy()
            && let Some(lent) = self.lent.take()
        {
            self.pd.context.keep(lent);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// On a machine without devices this shows that the reason is given in words, on one with them that they are described. Where devices
    /// must be there, the guest's tests say so.
    #[test]
    fn what_the_machine_has_is_told_or_why_there_is_nothing() {
        match devices() {
            Ok(devices) => {
                for device in devices {
                    let port = device.port().unwrap();
                    assert!(device.name().contains('/') && port.number > 0);
                    assert_eq!(device.in_use(), InUse::default());
                }
            }
            Err(reason) => assert!(reason.to_string().starts_with("no verbs devices: "), "{reason}"),
        }
    }
}
