//! Names the condition under which the GPU backend is part of the build, so that the code has one word for it.

#![allow(clippy::print_stdout, reason = "this is how a build script speaks to Cargo")]
#![allow(clippy::disallowed_methods, reason = "and how it is spoken to")]

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-check-cfg=cfg(gpu)");
    let always = matches!(std::env::var("CARGO_CFG_TARGET_OS").as_deref(), Ok("macos" | "windows"));
    if always || std::env::var_os("CARGO_FEATURE_GPU").is_some() {
        println!("cargo::rustc-cfg=gpu");
    }
}
