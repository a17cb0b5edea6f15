//! The library's objects, each destroyed once and after what was made from it.
//!
//! Every object holds what it was made from, so the order of destruction follows from ownership: a queue pair goes before its
//! completion queue and its protection domain, a registration before its domain, all before the device is closed.

use std::ffi::{c_int, c_void};
use std::os::fd::BorrowedFd;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use super::layout::{
    QPT_RC, QPT_UC, RawChannel, RawContext, RawCq, RawDevice, RawGidEntry, RawMr, RawPd, RawPort, RawQp, RawQpAttr, RawQpCap, RawQpInit,
    RawRecvWr, RawSendWr, RawWc, mask,
};
use super::library::Verbs;
use crate::link::lock;
use crate::provider::verbs::device::{InUse, VerbsError};
use crate::provider::verbs::profile::Profile;
use crate::region::LentPages;

/// What a registration that fails most likely lacks.
const MEMLOCK: &str = "; the limit of locked memory (ulimit -l) may be too low";

/// An open device.
pub(super) struct Context {
    pub(super) verbs: Arc<Verbs>,
    raw: NonNull<RawContext>,
    pub(super) name: String,
    pairs: AtomicUsize,
    completion_queues: AtomicUsize,
    registrations: AtomicUsize,
    /// Lent memory that the device did not let go of: mapped until the device is closed.
    stuck: Mutex<Vec<LentPages>>,
}

// SAFETY: the library's functions may be called for one device from any thread, and from several at once; what this crate changes
// itself is atomic.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// Opens a device.
    ///
    /// # Safety
    /// `device` must come from a list that has not been freed.
    pub(super) unsafe fn open(verbs: &Arc<Verbs>, device: *mut RawDevice) -> Result<Arc<Self>, VerbsError> {
        // SAFETY: the device is alive by this function's contract.
        let (name, raw) = unsafe { (verbs.name(device), (verbs.open_device)(device)) };
        let Some(raw) = NonNull::new(raw) else { return Err(last_error("ibv_open_device", &name, "")) };
        Ok(Arc::new(Self {
            verbs: Arc::clone(verbs),
            raw,
            name,
            pairs: AtomicUsize::new(0),
            completion_queues: AtomicUsize::new(0),
            registrations: AtomicUsize::new(0),
            stuck: Mutex::default(),
        }))
    }

    /// Keeps pages that the device still knows.
    pub(super) fn keep(&self, pages: LentPages) {
        lock(&self.stuck).push(pages);
    }

    pub(super) fn in_use(&self) -> InUse {
        InUse {
            pairs: self.pairs.load(Ordering::Acquire),
            completion_queues: self.completion_queues.load(Ordering::Acquire),
            registrations: self.registrations.load(Ordering::Acquire),
        }
    }

    pub(super) fn port(&self, number: u8) -> Result<RawPort, VerbsError> {
        let mut port = RawPort::default();
        // SAFETY: the context is open; `port` is at least as long as what any version of the library writes (see `layout`).
        let code = unsafe { (self.verbs.query_port)(self.raw.as_ptr(), number, &raw mut port) };
        self.checked("ibv_query_port", code).map(|()| port)
    }

    /// An entry of a port's table of addresses, with its type where the library tells it.
    pub(super) fn gid(&self, port: u8, index: u8) -> Option<([u8; 16], Option<u32>)> {
        if let Some(query) = self.verbs.query_gid_ex {
            let mut entry = RawGidEntry::default();
            // SAFETY: the context is open, and the entry's length is told.
            let code =
                unsafe { query(self.raw.as_ptr(), port.into(), index.into(), &raw mut entry, 0, std::mem::size_of::<RawGidEntry>()) };
            return (code == 0).then_some((entry.gid, Some(entry.gid_type)));
        }
        let mut gid = [0; 16];
        // SAFETY: the context is open, and an address has 16 bytes.
        let code = unsafe { (self.verbs.query_gid)(self.raw.as_ptr(), port, index.into(), &raw mut gid) };
        (code == 0).then_some((gid, None))
    }

    fn checked(&self, call: &'static str, code: c_int) -> Result<(), VerbsError> {
        match code {
            0 => Ok(()),
            // Some calls give the error's number, negative or not, some only -1.
            -1 => Err(last_error(call, &self.name, "")),
            code => Err(VerbsError::Call { call, device: self.name.clone(), code: code.saturating_abs(), hint: "" }),
        }
    }
}

fn last_error(call: &'static str, device: &str, hint: &'static str) -> VerbsError {
    let code = std::io::Error::last_os_error().raw_os_error().unwrap_or(0);
    VerbsError::Call { call, device: device.to_owned(), code, hint }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: everything that was made from the context held it, so it is gone.
        let code = unsafe { (self.verbs.close_device)(self.raw.as_ptr()) };
        left_over("ibv_close_device", &self.name, code);
    }
}

/// A destructor's failure: nothing can be done about it, and it must be known.
fn left_over(call: &'static str, device: &str, code: c_int) {
    if code != 0 {
        tracing::error!(call, device, code, "a verbs object could not be destroyed");
    }
}

/// A protection domain. One serves a whole device: their number is limited.
pub(super) struct Pd {
    raw: NonNull<RawPd>,
    pub(super) context: Arc<Context>,
}

// SAFETY: as for `Context`.
unsafe impl Send for Pd {}
// SAFETY: as for `Context`.
unsafe impl Sync for Pd {}

impl Pd {
    pub(super) fn new(context: &Arc<Context>) -> Result<Arc<Self>, VerbsError> {
        // SAFETY: the context is open.
        let raw = unsafe { (context.verbs.alloc_pd)(context.raw.as_ptr()) };
        let Some(raw) = NonNull::new(raw) else { return Err(last_error("ibv_alloc_pd", &context.name, "")) };
        Ok(Arc::new(Self { raw, context: Arc::clone(context) }))
    }
}

impl Drop for Pd {
    fn drop(&mut self) {
        // SAFETY: everything that was made from the domain held it, so it is gone.
        let code = unsafe { (self.context.verbs.dealloc_pd)(self.raw.as_ptr()) };
        left_over("ibv_dealloc_pd", &self.context.name, code);
    }
}

/// Memory that the device may read and write.
pub(super) struct Mr {
    /// None once it has been deregistered.
    raw: Option<NonNull<RawMr>>,
    lkey: u32,
    rkey: u32,
    start: usize,
    bytes: usize,
    pd: Arc<Pd>,
}

// SAFETY: it is a key and what destroys it; neither is bound to a thread.
unsafe impl Send for Mr {}

impl Mr {
    /// `access` are bits of `ibv_access_flags`.
    ///
    /// # Safety
    /// The memory must stay mapped. The device may only be told to touch a part of it while nobody else does, or where nobody has a reference
    /// into it: by this end's requests, or by the peer's if `access` lets it.
    pub(super) unsafe fn new(pd: &Arc<Pd>, start: *mut c_void, bytes: usize, access: u32) -> Result<Self, VerbsError> {
        let context = &pd.context;
        let access = c_int::try_from(access).unwrap_or(0);
        // SAFETY: the domain is alive; the memory is the caller's promise.
        let raw = unsafe { (context.verbs.reg_mr)(pd.raw.as_ptr(), start, bytes, access) };
        let Some(raw) = NonNull::new(raw) else { return Err(last_error("ibv_reg_mr", &context.name, MEMLOCK)) };
        context.registrations.fetch_add(1, Ordering::AcqRel);
        // SAFETY: the library gave a registration, whose keys lie where `layout` says.
        let RawMr { lkey, rkey, .. } = *unsafe { raw.as_ref() };
        Ok(Self { raw: Some(raw), lkey, rkey, start: start as usize, bytes, pd: Arc::clone(pd) })
    }

    /// The key with which the device may touch this memory, if it is all part of the registration.
    pub(super) fn key_for(&self, start: usize, bytes: usize) -> Option<u32> {
        let end = start.checked_add(bytes)?;
        (start >= self.start && end <= self.start + self.bytes).then_some(self.lkey)
    }

    /// The key with which the peer may, as far as it may.
    pub(super) fn remote_key(&self) -> u32 {
        self.rkey
    }

    /// Deregisters it, if that has not been done; whether it is done now.
    pub(super) fn destroy(&mut self) -> bool {
        let context = &self.pd.context;
        let Some(raw) = self.raw else { return true };
        // SAFETY: it was registered once and has not been deregistered; the queue pair that used it is gone, or was refused to go (see
        // `super::FfiPair`).
        let code = unsafe { (context.verbs.dereg_mr)(raw.as_ptr()) };
        left_over("ibv_dereg_mr", &context.name, code);
        if code == 0 {
            self.raw = None;
            context.registrations.fetch_sub(1, Ordering::AcqRel);
        }
        code == 0
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        self.destroy();
    }
}

/// A completion queue, with its channel where the library has them.
pub(super) struct Cq {
    raw: NonNull<RawCq>,
    channel: Option<NonNull<RawChannel>>,
    events: u32,
    context: Arc<Context>,
}

// SAFETY: as for `Mr`.
unsafe impl Send for Cq {}

impl Cq {
    pub(super) fn new(context: &Arc<Context>, entries: u32) -> Result<Self, VerbsError> {
        // SAFETY: the context is open.
        let channel = context.verbs.create_comp_channel.and_then(|create| NonNull::new(unsafe { create(context.raw.as_ptr()) }));
        if let Some(channel) = channel {
            // SAFETY: the channel was just made and is not closed while this borrow lasts.
            let fd = unsafe { BorrowedFd::borrow_raw(channel.as_ref().fd) };
            let nonblocking =
                rustix::fs::fcntl_getfl(fd).and_then(|flags| rustix::fs::fcntl_setfl(fd, flags | rustix::fs::OFlags::NONBLOCK));
            if let Err(error) = nonblocking {
                destroy_channel(context, channel);
                let code = error.raw_os_error();
                return Err(VerbsError::Call { call: "fcntl", device: context.name.clone(), code, hint: "" });
            }
        }
        let entries = c_int::try_from(entries).unwrap_or(c_int::MAX);
        let raw_channel = channel.map_or(null_mut(), NonNull::as_ptr);
        // SAFETY: the context is open, the channel was made from it.
        let raw = unsafe { (context.verbs.create_cq)(context.raw.as_ptr(), entries, null_mut(), raw_channel, 0) };
        let Some(raw) = NonNull::new(raw) else {
            let error = last_error("ibv_create_cq", &context.name, "");
            if let Some(channel) = channel {
                destroy_channel(context, channel);
            }
            return Err(error);
        };
        context.completion_queues.fetch_add(1, Ordering::AcqRel);
        Ok(Self { raw, channel, events: 0, context: Arc::clone(context) })
    }

    /// Takes completions. `out` is filled from its start.
    pub(super) fn poll(&mut self, out: &mut [RawWc]) -> Result<usize, VerbsError> {
        let most = c_int::try_from(out.len()).unwrap_or(c_int::MAX);
        // SAFETY: the queue is alive, so its context is; the call writes at most `most` entries.
        let count = unsafe {
            let ops = &(*self.raw.as_ref().context).ops;
            (ops.poll_cq)(self.raw.as_ptr(), most, out.as_mut_ptr())
        };
        usize::try_from(count).map_err(|_| VerbsError::Call {
            call: "ibv_poll_cq",
            device: self.context.name.clone(),
            code: count.saturating_abs(),
            hint: "",
        })
    }

    /// Asks for an event at the next completion.
    pub(super) fn arm(&mut self) -> Result<(), VerbsError> {
        if self.channel.is_none() {
            return Ok(());
        }
        // SAFETY: as in `poll`.
        let code = unsafe {
            let ops = &(*self.raw.as_ref().context).ops;
            (ops.req_notify_cq)(self.raw.as_ptr(), 0)
        };
        self.context.checked("ibv_req_notify_cq", code)
    }

    pub(super) fn events(&self) -> Option<BorrowedFd<'_>> {
        // SAFETY: the channel and its descriptor live as long as `self`.
        self.channel.as_ref().map(|channel| unsafe { BorrowedFd::borrow_raw(channel.as_ref().fd) })
    }

    /// Takes the events that are there; the descriptor does not block.
    pub(super) fn take_events(&mut self) {
        let (Some(channel), Some(get)) = (self.channel, self.context.verbs.get_cq_event) else { return };
        let (mut cq, mut of_ours) = (null_mut(), null_mut());
        // SAFETY: the channel is alive, and both pointers are there to be written.
        while unsafe { get(channel.as_ptr(), &raw mut cq, &raw mut of_ours) } == 0 {
            self.events += 1;
        }
    }
}

fn destroy_channel(context: &Context, channel: NonNull<RawChannel>) {
    if let Some(destroy) = context.verbs.destroy_comp_channel {
        // SAFETY: its completion queue is gone, or was never made.
        left_over("ibv_destroy_comp_channel", &context.name, unsafe { destroy(channel.as_ptr()) });
    }
}

impl Drop for Cq {
    fn drop(&mut self) {
        let context = Arc::clone(&self.context);
        if let Some(ack) = context.verbs.ack_cq_events.filter(|_| self.events > 0) {
            // SAFETY: as many are acknowledged as were taken; the next call waits for that.
            unsafe { ack(self.raw.as_ptr(), self.events) };
        }
        // SAFETY: the queue pair that completed into it is gone: it held this.
        let code = unsafe { (context.verbs.destroy_cq)(self.raw.as_ptr()) };
        left_over("ibv_destroy_cq", &context.name, code);
        if code == 0 {
            context.completion_queues.fetch_sub(1, Ordering::AcqRel);
            if let Some(channel) = self.channel {
                destroy_channel(&context, channel);
            }
        }
    }
}

/// A queue pair.
pub(super) struct Qp {
    raw: NonNull<RawQp>,
    destroyed: bool,
    pub(super) cq: Cq,
    pd: Arc<Pd>,
}

// SAFETY: as for `Mr`.
unsafe impl Send for Qp {}

impl Qp {
    /// Makes one whose completions all go to `cq`. Says what it was given.
    pub(super) fn new(pd: &Arc<Pd>, cq: Cq, profile: Profile, cap: RawQpCap) -> Result<(Self, RawQpCap), VerbsError> {
        let context = &pd.context;
        let mut init = RawQpInit {
            qp_context: null_mut(),
            send_cq: cq.raw.as_ptr(),
            recv_cq: cq.raw.as_ptr(),
            srq: null_mut(),
            cap,
            qp_type: if profile.is_reliable() { QPT_RC } else { QPT_UC },
            sq_sig_all: 1,
        };
        // SAFETY: domain and completion queue are alive and of one device.
        let raw = unsafe { (context.verbs.create_qp)(pd.raw.as_ptr(), &raw mut init) };
        let Some(raw) = NonNull::new(raw) else { return Err(last_error("ibv_create_qp", &context.name, "")) };
        context.pairs.fetch_add(1, Ordering::AcqRel);
        let qp = Self { raw, destroyed: false, cq, pd: Arc::clone(pd) };
        let (mut attributes, mut again) = (RawQpAttr::default(), RawQpInit { cap: RawQpCap::default(), ..init });
        // SAFETY: the queue pair is alive, and both structures are there to be written.
        let code = unsafe { (context.verbs.query_qp)(raw.as_ptr(), &raw mut attributes, mask::CAP, &raw mut again) };
        context.checked("ibv_query_qp", code)?;
        Ok((qp, RawQpCap { max_inline_data: init.cap.max_inline_data, ..attributes.cap }))
    }

    pub(super) fn number(&self) -> u32 {
        // SAFETY: the queue pair is alive, and its number lies where `layout` says.
        unsafe { self.raw.as_ref() }.qp_num
    }

    pub(super) fn modify(&mut self, attributes: &mut RawQpAttr, mask: c_int) -> Result<(), VerbsError> {
        let context = &self.pd.context;
        // SAFETY: the queue pair is alive.
        let code = unsafe { (context.verbs.modify_qp)(self.raw.as_ptr(), attributes, mask) };
        context.checked("ibv_modify_qp", code)
    }

    /// # Safety
    /// What the request names must be registered, and untouched until its completion or the end of the queue pair.
    pub(super) unsafe fn post_send(&mut self, request: &mut RawSendWr) -> Result<(), VerbsError> {
        let mut bad = null_mut();
        // SAFETY: the queue pair is alive, so its context is; the request is the caller's promise.
        let code = unsafe {
            let ops = &(*self.raw.as_ref().context).ops;
            (ops.post_send)(self.raw.as_ptr(), request, &raw mut bad)
        };
        self.pd.context.checked("ibv_post_send", code)
    }

    /// # Safety
    /// As for [`Self::post_send`].
    pub(super) unsafe fn post_recv(&mut self, request: &mut RawRecvWr) -> Result<(), VerbsError> {
        let mut bad = null_mut();
        // SAFETY: as above.
        let code = unsafe {
            let ops = &(*self.raw.as_ref().context).ops;
            (ops.post_recv)(self.raw.as_ptr(), request, &raw mut bad)
        };
        self.pd.context.checked("ibv_post_recv", code)
    }
}

impl Qp {
    /// Destroys it and its completion queue, or gives it back if the library refuses.
    pub(super) fn destroy(mut self) -> Result<(), Self> {
        if self.try_destroy() { Ok(()) } else { Err(self) }
    }

    fn try_destroy(&mut self) -> bool {
        let context = &self.pd.context;
        if !self.destroyed {
            // It is destroyed as it is: moving it to the error state first has upset Apple's library.
            // SAFETY: made once, destroyed once; nobody else has it, and it is not used afterwards: `destroy` takes it.
            let code = unsafe { (context.verbs.destroy_qp)(self.raw.as_ptr()) };
            left_over("ibv_destroy_qp", &context.name, code);
            if code == 0 {
                self.destroyed = true;
                context.pairs.fetch_sub(1, Ordering::AcqRel);
            }
        }
        self.destroyed
    }
}

impl Drop for Qp {
    fn drop(&mut self) {
        self.try_destroy();
    }
}
