//! Regions, windows, device memory and imports: what is asked of the router, and what goes with a context.
use crate::common::{FakeRouter, device};
use freeflow_client::{Context, DeviceMemory, Session};
use freeflow_protocol::PROTOCOL;
use freeflow_protocol::library::Request;
use freeflow_verbs::{Access, RegionChange, VerbsError, WindowKind};
use std::sync::Arc;

fn start(name: &str) -> (FakeRouter, Arc<Session>, Context) {
    let router = FakeRouter::start(name, PROTOCOL);
    let session = Arc::new(Session::connect(&router.path).unwrap());
    let context = Context::open(&session).unwrap();
    (router, session, context)
}

#[test]
fn device_memory_is_bounded_and_copied_in_words() {
    let (router, _session, context) = start("device-memory");
    let limit = device().device_memory_bytes_max as usize;
    let refused = |length| DeviceMemory::allocate(&context, length).unwrap_err();
    assert_eq!((refused(0), refused(limit + 1)), (VerbsError::InvalidArgument, VerbsError::InvalidArgument));
    let memory = DeviceMemory::allocate(&context, 100).unwrap();
    assert_eq!(refused(limit), VerbsError::NoMemory);
    assert_eq!(memory.length(), 100);
    assert_eq!(memory.write(4, b"abcdefgh"), Ok(()));
    let mut read = [0; 8];
    assert_eq!(memory.read(8, &mut read), Ok(()));
    assert_eq!(&read, b"efgh\0\0\0\0");
    for (offset, length, error) in [
        (3, 4, VerbsError::InvalidArgument),
        (4, 3, VerbsError::InvalidArgument),
        (104, 4, VerbsError::BadAddress),
        (0, 104, VerbsError::BadAddress),
        (u64::MAX, 4, VerbsError::BadAddress),
    ] {
        assert_eq!(memory.write(offset, &vec![0; length]), Err(error), "{offset} {length}");
        assert_eq!(memory.read(offset, &mut vec![0; length]), Err(error), "{offset} {length}");
    }
    assert_eq!(memory.place(4, 96).unwrap() - memory.place(0, 0).unwrap(), 4);
    assert_eq!(memory.place(4, 97), Err(VerbsError::InvalidArgument));
    memory.free().unwrap();
    drop(memory);
    DeviceMemory::allocate(&context, limit).unwrap().free().unwrap();
    let objects = router.objects();
    let mapped = objects.requests.iter().filter(|request| matches!(request, Request::MapSegment { .. }));
    assert_eq!(mapped.count(), 2, "the router knows where the memory lies");
}

#[test]
fn imports_name_the_other_process_handles() {
    let (router, session, _own) = start("imports");
    let imported = Context::import(&session, [7; 16]).unwrap();
    let pd = session.import_pd(imported.handle(), 40).unwrap();
    let (region, length) = session.import_region(pd, 41).unwrap();
    assert_eq!(length, 4096);
    let memory = DeviceMemory::import(&imported, 42).unwrap();
    assert_eq!(memory.length(), 8192, "whole pages");
    session.deregister(region.handle).unwrap();
    let context = imported.handle();
    let expected = [
        Request::ImportContext { pass: [7; 16] },
        Request::ImportPd { context, pd: 40 },
        Request::ImportMr { pd, mr: 41 },
        Request::ImportSegment { context, segment: 42 },
    ];
    let objects = router.objects();
    assert!(expected.iter().all(|request| objects.requests.contains(request)), "{:?}", objects.requests);
}

#[test]
fn a_region_changes_under_its_handle() {
    let (router, session, context) = start("reregister");
    let pd = session.alloc_pd(context.handle()).unwrap();
    let region = session.register(pd, 4096, 10, 4096, Access::LOCAL_WRITE).unwrap();
    let change = RegionChange { translation: None, access: Some(Access::default()) };
    let changed = session.reregister(region.handle, None, change).unwrap();
    assert_eq!((changed.handle, changed.lkey), (region.handle, region.lkey));
    let asked = Request::ReregisterMr { mr: region.handle, pd: None, change };
    assert_eq!(router.objects().requests.last(), Some(&asked));
}

#[test]
fn a_context_takes_its_windows_regions_and_device_memory_along() {
    let (router, session, context) = start("belongings");
    let pd = session.alloc_pd(context.handle()).unwrap();
    let null = session.alloc_null_region(pd).unwrap().handle;
    let (window, _) = session.alloc_window(pd, WindowKind::Type2).unwrap();
    let memory = DeviceMemory::allocate(&context, 4096).unwrap();
    let close = Request::CloseContext { context: context.handle() };
    router.objects().busy_once = Some(close.clone());
    context.close().unwrap();
    let expected = [
        Request::DeallocMw { mw: window },
        Request::DeregisterMr { mr: null },
        Request::DestroySegment { segment: memory.handle() },
        Request::DeallocPd { pd },
        close,
    ];
    let objects = router.objects();
    assert!(objects.requests.ends_with(&expected), "{:?}", objects.requests);
    drop(objects);
    // The limit counts what is there.
    let context = Context::open(&session).unwrap();
    let memory = DeviceMemory::allocate(&context, device().device_memory_bytes_max as usize).unwrap();
    context.close().unwrap();
    let last = Request::DestroySegment { segment: memory.handle() };
    assert_eq!(router.objects().requests.last(), Some(&last), "it keeps no context from closing");
}
