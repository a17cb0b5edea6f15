//! Frame headers, grants, and heads of remote operations.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    shoal_transport::fuzzing::frame_header(data);
    shoal_transport::fuzzing::grant(data);
    shoal_transport::fuzzing::remote_head(data);
});
