//! The words of a handshake, and the list of addresses after it.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    shoal_transport::fuzzing::handshake(data);
    shoal_transport::fuzzing::addresses(data);
});
