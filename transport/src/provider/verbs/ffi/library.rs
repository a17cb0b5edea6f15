//! The verbs library, found when it is first asked for.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::ManuallyDrop;

use libloading::Library;

use super::layout::{RawChannel, RawContext, RawCq, RawDevice, RawGidEntry, RawMr, RawPd, RawPort, RawQp, RawQpAttr, RawQpInit};
use crate::provider::verbs::device::NoDevices;

/// Where the library is, in the order of trying.
const NAMES: &[&str] =
    if cfg!(target_os = "macos") { &["/usr/lib/librdma.dylib", "librdma.dylib"] } else { &["libibverbs.so.1", "libibverbs.so"] };

macro_rules! verbs {
    (
        required { $($name:ident: $symbol:literal ($($argument:ty),*) -> $result:ty;)* }
        optional { $($maybe:ident: $maybe_symbol:literal ($($maybe_argument:ty),*) -> $maybe_result:ty;)* }
    ) => {
        /// The library's functions, by their names without `ibv_`.
        pub(super) struct Verbs {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) -> $result,)*
            $(pub(super) $maybe: Option<unsafe extern "C" fn($($maybe_argument),*) -> $maybe_result>,)*
            /// Never unloaded: what it loaded itself for the machine's devices may have threads and exit handlers.
            _library: ManuallyDrop<Library>,
        }

        fn bind(library: Library) -> Result<Verbs, NoDevices> {
            Ok(Verbs {
                // SAFETY: the symbol has the type that `infiniband/verbs.h` declares for it, as written below; the
                // pointer stays good because the library is never unloaded.
                $($name: *unsafe { library.get(concat!($symbol, "\0").as_bytes()) }
                    .map_err(|_| NoDevices::Symbol { name: $symbol })?,)*
                // SAFETY: as above.
                $($maybe: unsafe { library.get(concat!($maybe_symbol, "\0").as_bytes()) }.ok().map(|symbol| *symbol),)*
                _library: ManuallyDrop::new(library),
            })
        }
    };
}

verbs! {
    required {
        get_device_list: "ibv_get_device_list" (*mut c_int) -> *mut *mut RawDevice;
        free_device_list: "ibv_free_device_list" (*mut *mut RawDevice) -> ();
        get_device_name: "ibv_get_device_name" (*mut RawDevice) -> *const c_char;
        open_device: "ibv_open_device" (*mut RawDevice) -> *mut RawContext;
        close_device: "ibv_close_device" (*mut RawContext) -> c_int;
        query_port: "ibv_query_port" (*mut RawContext, u8, *mut RawPort) -> c_int;
        query_gid: "ibv_query_gid" (*mut RawContext, u8, c_int, *mut [u8; 16]) -> c_int;
        alloc_pd: "ibv_alloc_pd" (*mut RawContext) -> *mut RawPd;
        dealloc_pd: "ibv_dealloc_pd" (*mut RawPd) -> c_int;
        reg_mr: "ibv_reg_mr" (*mut RawPd, *mut c_void, usize, c_int) -> *mut RawMr;
        dereg_mr: "ibv_dereg_mr" (*mut RawMr) -> c_int;
        create_cq: "ibv_create_cq" (*mut RawContext, c_int, *mut c_void, *mut RawChannel, c_int) -> *mut RawCq;
        destroy_cq: "ibv_destroy_cq" (*mut RawCq) -> c_int;
        create_qp: "ibv_create_qp" (*mut RawPd, *mut RawQpInit) -> *mut RawQp;
        modify_qp: "ibv_modify_qp" (*mut RawQp, *mut RawQpAttr, c_int) -> c_int;
        query_qp: "ibv_query_qp" (*mut RawQp, *mut RawQpAttr, c_int, *mut RawQpInit) -> c_int;
        destroy_qp: "ibv_destroy_qp" (*mut RawQp) -> c_int;
    }
    optional {
        query_gid_ex: "_ibv_query_gid_ex" (*mut RawContext, u32, u32, *mut RawGidEntry, u32, usize) -> c_int;
        create_comp_channel: "ibv_create_comp_channel" (*mut RawContext) -> *mut RawChannel;
        destroy_comp_channel: "ibv_destroy_comp_channel" (*mut RawChannel) -> c_int;
        get_cq_event: "ibv_get_cq_event" (*mut RawChannel, *mut *mut RawCq, *mut *mut c_void) -> c_int;
        ack_cq_events: "ibv_ack_cq_events" (*mut RawCq, u32) -> ();
    }
}

impl Verbs {
    /// Loads the library.
    ///
    /// # Errors
    /// [`NoDevices`] if there is none or it lacks a function.
    pub(super) fn load() -> Result<Self, NoDevices> {
        let mut reason = String::new();
        for name in NAMES {
            // SAFETY: loading runs the library's initialisers. It is the system's own, at the place where it belongs, and
            // made to be loaded by any program.
            match unsafe { Library::new(*name) } {
                Ok(library) => return bind(library),
                // What the first of them says names the usual place.
                Err(error) if reason.is_empty() => reason = error.to_string(),
                Err(_) => {}
            }
        }
        Err(NoDevices::Library { reason })
    }

    /// A device's name.
    ///
    /// # Safety
    /// `device` must come from a list that has not been freed.
    pub(super) unsafe fn name(&self, device: *mut RawDevice) -> String {
        // SAFETY: the device is alive, and its name is a C string inside of it.
        unsafe { CStr::from_ptr((self.get_device_name)(device)) }.to_string_lossy().into_owned()
    }
}
