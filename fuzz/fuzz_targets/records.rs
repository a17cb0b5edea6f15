//! Records of a TCP link, sealed or not, on one to three rails.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    shoal_transport::fuzzing::records(data);
});
